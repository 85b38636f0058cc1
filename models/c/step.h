/* Reads the files of `ortops export-step` into tensors of onnxruntime's C API. */

#pragma once
#include "json.h"
#include <onnxruntime_c_api.h>

typedef struct {
    const char *name, *next, *places; /* next: the output that is its next value */
    const char *rows;                 /* of a feed: all samples */
    int64_t shape[8];
    size_t rank, bytes;
    ONNXTensorElementDataType type;
    char *data;
    OrtValue *value;
} Tensor;

static const struct { const char *name, *short_name; int type; size_t size; } TYPES[] = {
    {"float32", "F32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},
    {"float64", "F64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8},
    {"float16", "F16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2},
    {"bfloat16", "BF16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, 2},
    {"int64", "I64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},
    {"int32", "I32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4},
    {"uint8", "U8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 1},
    {"bool", "BOOL", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 1},
};

static const OrtApi *ort;

static void check(OrtStatus *status) {
    if (status) stop("onnxruntime: ", ort->GetErrorMessage(status));
}

/* Returns the content of a file of the folder, and its path. */
static char *file_of(const char *folder, const char *name, const char *json, char **path,
                     size_t *size) {
    *path = memory(strlen(folder) + strlen(name) + 2);
    sprintf(*path, "%s/%s", folder, name);
    char *bytes = read_file(*path, size);
    if (json && number(find(find(find(json, "files"), name), "crc32")) != crc32(bytes, *size))
        stop("checksum differs from step.json: ", name);
    return bytes;
}

static Tensor tensor(const char *name, const char *type, const char *shape) {
    Tensor made = {.name = name};
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (!strcmp(type, TYPES[i].name) || !strcmp(type, TYPES[i].short_name)) {
            made.type = TYPES[i].type;
            made.bytes = TYPES[i].size;
        }
    if (!made.bytes) stop("unsupported type: ", type);
    for (const char *dim = first(shape); dim; dim = following(dim)) {
        if (made.rank == 8) stop("too many dimensions: ", name);
        made.shape[made.rank++] = (int64_t)number(dim);
        made.bytes *= number(dim);
    }
    return made;
}

/* Returns a feed of a batch's rows; onnxruntime checks its type and shape. */
static Tensor feed(const char *described, const char *header, const char *data, size_t size,
                   size_t batch, size_t *rows) {
    const char *name = text(find(described, "name")), *json = find(header, name);
    Tensor made = tensor(name, text(find(json, "dtype")), find(json, "shape"));
    size_t begin = number(first(find(json, "data_offsets")));
    if (begin > size || made.bytes > size - begin) stop("the data end unexpectedly: ", name);
    size_t own = made.rank ? (size_t)made.shape[0] : 0;
    if (own < batch) stop("a feed has fewer rows than a batch: ", name);
    if (*rows && *rows != own) stop("feeds have different numbers of rows: ", name);
    *rows = own;
    made.bytes = made.bytes / own * batch;
    made.shape[0] = (int64_t)batch;
    made.rows = data + begin;
    made.data = memory(made.bytes);
    return made;
}

/* Returns a variable with the value that it has in the model. */
static Tensor variable(const char *name, const char *json, char *model, size_t size) {
    Tensor made = tensor(name, text(find(json, "type")), find(json, "shape"));
    const char *next = find(json, "next");
    made.next = is_null(next) ? NULL : text(next);
    made.places = find(json, "places");
    if (!first(made.places)) stop("model.onnx does not store ", name);
    for (const char *place = first(made.places); place; place = following(place)) {
        size_t offset = number(first(place)), length = number(following(first(place)));
        if (length != made.bytes || offset > size || length > size - offset)
            stop("step.json and model.onnx do not belong together: ", name);
        made.data = model + offset;
    }
    made.data = memcpy(memory(made.bytes), made.data, made.bytes);
    return made;
}

static float loss_of(OrtValue *value) {
    OrtTensorTypeAndShapeInfo *info = NULL;
    ONNXTensorElementDataType type;
    float *loss = NULL;
    check(ort->GetTensorTypeAndShape(value, &info));
    check(ort->GetTensorElementType(info, &type));
    if (type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) stop("the loss is not float32", "");
    check(ort->GetTensorMutableData(value, (void **)&loss));
    ort->ReleaseTensorTypeAndShapeInfo(info);
    return *loss;
}
