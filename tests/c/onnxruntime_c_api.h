/* What models/c uses of onnxruntime's C API, for tests where its header is not installed.

   onnxruntime never changes the order of the functions in OrtApi, which is its binary interface;
   each has its number here. */

#pragma once
#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 17

typedef enum {
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 = 2,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 = 6,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL = 9,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE = 11,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 = 16
} ONNXTensorElementDataType;
typedef enum { ORT_LOGGING_LEVEL_WARNING = 2 } OrtLoggingLevel;
typedef enum { OrtArenaAllocator = 1 } OrtAllocatorType;
typedef enum { OrtMemTypeDefault = 0 } OrtMemType;

typedef struct OrtEnv OrtEnv;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtSession OrtSession;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtStatus OrtStatus;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtValue OrtValue;

typedef struct {
    void *from_0[2];
    const char *(*GetErrorMessage)(const OrtStatus *); /* 2 */
    OrtStatus *(*CreateEnv)(OrtLoggingLevel, const char *, OrtEnv **);
    void *from_4[3];
    OrtStatus *(*CreateSession)(const OrtEnv *, const char *, const OrtSessionOptions *, OrtSession **); /* 7 */
    void *from_8[1];
    OrtStatus *(*Run)(OrtSession *, const OrtRunOptions *, const char *const *, const OrtValue *const *,
                      size_t, const char *const *, size_t, OrtValue **); /* 9 */
    OrtStatus *(*CreateSessionOptions)(OrtSessionOptions **);
    void *from_11[19];
    OrtStatus *(*SessionGetInputCount)(const OrtSession *, size_t *); /* 30 */
    void *from_31[18];
    OrtStatus *(*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo *, void *, size_t, const int64_t *,
                                                 size_t, ONNXTensorElementDataType, OrtValue **); /* 49 */
    void *from_50[1];
    OrtStatus *(*GetTensorMutableData)(OrtValue *, void **); /* 51 */
    void *from_52[8];
    OrtStatus *(*GetTensorElementType)(const OrtTensorTypeAndShapeInfo *, ONNXTensorElementDataType *); /* 60 */
    void *from_61[4];
    OrtStatus *(*GetTensorTypeAndShape)(const OrtValue *, OrtTensorTypeAndShapeInfo **); /* 65 */
    void *from_66[3];
    OrtStatus *(*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo **); /* 69 */
    void *from_70[26];
    void (*ReleaseValue)(OrtValue *); /* 96 */
    void *from_97[2];
    void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo *); /* 99 */
} OrtApi;

typedef struct {
    const OrtApi *(*GetApi)(uint32_t version);
} OrtApiBase;

const OrtApiBase *OrtGetApiBase(void);
