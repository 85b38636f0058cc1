// A CUDA device that computes nothing: memory of the host stands for the device's, copies are made,
// and kernels are not run. So a session of onnxruntime's CUDA provider can be made without a GPU,
// and says on which provider each node is placed. Functions that are not here return 0.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int error;

static uintptr_t handles = 16;
static error make(void **handle) {
    *handle = (void *)(handles += 16);
    return 0;
}

#ifdef LIBCUDART
static error allocate(void **memory, size_t size) {
    size_t most = (size + 256) / 256 * 256;
    *memory = aligned_alloc(256, most);
    if (*memory == NULL) return 2;
    memset(*memory, 0, most); // so that runs are equal
    return 0;
}
static error release(void *memory) {
    free(memory);
    return 0;
}
error cudaMalloc(void **memory, size_t size) { return allocate(memory, size); }
error cudaMallocHost(void **memory, size_t size) { return allocate(memory, size); }
error cudaHostAlloc(void **memory, size_t size, unsigned flags) { return allocate(memory, size); }
error cudaMallocFromPoolAsync(void **memory, size_t size, void *pool, void *stream) { return allocate(memory, size); }
error cudaFree(void *memory) { return release(memory); }
error cudaFreeHost(void *memory) { return release(memory); }
error cudaFreeAsync(void *memory, void *stream) { return release(memory); }

error cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    memmove(to, from, size);
    return 0;
}
error cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    return cudaMemcpy(to, from, size, kind);
}
error cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t rows,
                        int kind, void *stream) {
    for (size_t row = 0; row < rows; row++) memmove(to + row * to_pitch, from + row * from_pitch, width);
    return 0;
}
error cudaMemset(void *memory, int value, size_t size) {
    memset(memory, value, size);
    return 0;
}
error cudaMemsetAsync(void *memory, int value, size_t size, void *stream) { return cudaMemset(memory, value, size); }
error cudaMemGetInfo(size_t *available, size_t *total) {
    *available = *total = (size_t)80 << 30;
    return 0;
}

error cudaGetDeviceCount(int *count) {
    *count = 1;
    return 0;
}
error cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}
error cudaDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}
error cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

enum { COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76, PROCESSORS = 16, WARP = 10, SHARED_OPT_IN = 97 }; // cudaDeviceAttr
error cudaDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == COMPUTE_MAJOR   ? 9
             : attribute == COMPUTE_MINOR ? 0
             : attribute == PROCESSORS    ? 132
             : attribute == WARP          ? 32
             : attribute == SHARED_OPT_IN ? 232448
                                          : 1024;
    return 0;
}
error cudaGetDeviceProperties(char *properties, int device) { // offsets in CUDA 13's cudaDeviceProp
    static const struct {
        size_t offset;
        int value;
    } fields[] = {{304, 65536}, {308, 32},   {320, 1024},   {324, 1024}, {328, 1024},  {332, 64},
                  {336, 2147483647}, {340, 65535}, {344, 65535}, {360, 9},    {364, 0},     {384, 132},
                  {560, 1},     {596, 50 << 20}, {604, 2048}, {632, 65536}, {636, 1}};
    memset(properties, 0, 1008);
    strcpy(properties, "double");
    for (size_t at = 0; at < sizeof fields / sizeof *fields; at++)
        memcpy(properties + fields[at].offset, &fields[at].value, sizeof(int));
    const size_t total = (size_t)80 << 30, shared = 49152, more = 232448;
    memcpy(properties + 288, &total, sizeof total);
    memcpy(properties + 296, &shared, sizeof shared);
    memcpy(properties + 624, &more, sizeof more);
    memcpy(properties + 672, &more, sizeof more);
    return 0;
}
error cudaPointerGetAttributes(char *attributes, void *memory) {
    memset(attributes, 0, 88);
    attributes[0] = 2; // cudaMemoryTypeDevice
    memcpy(attributes + 8, &memory, sizeof memory);
    return 0;
}
error cudaFuncGetAttributes(char *attributes, const void *function) {
    const int threads = 1024, registers = 32;
    memset(attributes, 0, 144);
    memcpy(attributes + 24, &threads, sizeof threads);
    memcpy(attributes + 28, &registers, sizeof registers);
    return 0;
}
error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size, size_t shared,
                                                             unsigned flags) {
    *blocks = 2;
    return 0;
}
error cudaStreamIsCapturing(void *stream, int *status) {
    *status = 0;
    return 0;
}
error cudaStreamCreate(void **stream) { return make(stream); }
error cudaStreamCreateWithFlags(void **stream, unsigned flags) { return make(stream); }
error cudaEventCreate(void **event) { return make(event); }
error cudaEventCreateWithFlags(void **event, unsigned flags) { return make(event); }
error cudaMemPoolCreate(void **pool, const void *properties) { return make(pool); }
error cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, uint64_t flags, int *result) {
    *found = NULL;
    if (result) *result = 1;
    return 0;
}
const char *cudaGetErrorName(error code) { return "double"; }
const char *cudaGetErrorString(error code) { return "double"; }
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}
#endif

#ifdef LIBCUDNN
size_t cudnnGetVersion(void) { return 91300; }
const char *cudnnGetErrorString(error code) { return "double"; }
void cudnnGetLastErrorString(char *text, size_t size) {
    if (size) *text = 0;
}
error cudnnBackendCreateDescriptor(int type, void **descriptor) { return make(descriptor); }
error cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t asked, int64_t *count, void *values) {
    if (count) *count = 1;
    if (values && asked > 0) memset(values, 0, 8);
    return 0;
}
static error size_of(size_t *size) {
    if (size) *size = 256;
    return 0;
}
error cudnnDropoutGetStatesSize(void *handle, size_t *size) { return size_of(size); }
error cudnnGetConvolutionForwardWorkspaceSize(void *h, void *x, void *w, void *c, void *y, int algorithm, size_t *size) {
    return size_of(size);
}
error cudnnGetReductionIndicesSize(void *h, void *reduce, void *a, void *c, size_t *size) { return size_of(size); }
error cudnnGetReductionWorkspaceSize(void *h, void *reduce, void *a, void *c, size_t *size) { return size_of(size); }
error cudnnGetRNNTempSpaceSizes(void *h, void *rnn, int mode, void *x, size_t *work, size_t *reserve) {
    return size_of(work) | size_of(reserve);
}
#endif
