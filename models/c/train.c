/* Trains with onnxruntime's C API, from a folder that `ortops export-step` wrote.

   train FOLDER DATA.safetensors BATCH STEPS OUTPUT.onnx

   DATA has an array for each feed of the step, one row for each sample; batches are taken in its
   order. The loss is printed, and the trained state is written into a copy of FOLDER/model.onnx,
   which onnxruntime runs and ortops.TrainingSession goes on with. README.md tells how to build this.
   For little-endian machines. */

#include <onnxruntime_c_api.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DIMS = 8, MOST_NAMES = 4096 };

typedef struct {
    const char *json, *name, *next; /* its description, and the output that is its next value */
    int64_t shape[MOST_DIMS];
    size_t rank, bytes;
    ONNXTensorElementDataType type;
    const char *rows; /* of a feed: all samples */
    char *data;
    OrtValue *value;
} Tensor;

static const OrtApi *ort;

static void stop(const char *problem, const char *which) {
    fprintf(stderr, "train: %s%.500s\n", problem, which);
    exit(1);
}

static void check(OrtStatus *status) {
    if (status) stop("onnxruntime: ", ort->GetErrorMessage(status));
}

static void *memory(size_t bytes) {
    void *found = calloc(bytes ? bytes : 1, 1);
    if (!found) stop("out of memory", "");
    return found;
}

static char *path_of(const char *folder, const char *name) {
    char *path = memory(strlen(folder) + strlen(name) + 2);
    sprintf(path, "%s/%s", folder, name);
    return path;
}

static char *read_file(const char *path, size_t *size) { /* with a zero behind its last byte */
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) stop("cannot be read: ", path);
    *size = (size_t)ftell(file);
    char *bytes = memory(*size + 1);
    rewind(file);
    if (fread(bytes, 1, *size, file) != *size) stop("cannot be read: ", path);
    fclose(file);
    return bytes;
}

/* JSON, read where it stands: a value is the place where its text begins. */

static const char *blank(const char *at) { return at + strspn(at, " \t\r\n"); }

static const char *behind(const char *at) { /* what follows a value */
    if (*at == '"') {
        for (at++; *at && *at != '"'; at++)
            if (*at == '\\' && at[1]) at++;
    } else if (*at == '{' || *at == '[') {
        char end = *at == '{' ? '}' : ']';
        for (at = blank(at + 1); *at && *at != end;) {
            at = behind(at);
            if (*at == ':' || *at == ',') at = blank(at + 1);
        }
    } else {
        size_t length = strcspn(at, "\",:[]{} \t\r\n");
        if (!length) stop("no JSON: ", at);
        return blank(at + length);
    }
    if (!*at) stop("JSON ends too early", "");
    return blank(at + 1);
}

static const char *whole(const char *text) { /* a value and nothing else */
    text = blank(text);
    if (*behind(text)) stop("no JSON: ", behind(text));
    return text;
}

static const char *first(const char *container) { /* its first key or element; NULL if empty */
    if (*container != '{' && *container != '[') stop("no object or array: ", container);
    const char *at = blank(container + 1);
    return *at == '}' || *at == ']' ? NULL : at;
}

static const char *following(const char *at) { /* the key or element after this one, or NULL */
    at = behind(at);
    return *at == ',' ? blank(at + 1) : NULL;
}

static const char *of_key(const char *key) { return blank(behind(key) + 1); }

static const char *following_key(const char *key) { return following(of_key(key)); }

static const char *text(const char *at) {
    size_t length = strcspn(at + 1, "\"\\");
    if (*at != '"' || at[1 + length] != '"') stop("no string without escapes: ", at);
    return memcpy(memory(length + 1), at + 1, length);
}

static const char *find(const char *object, const char *name) {
    for (const char *key = first(object); key; key = following_key(key))
        if (!strcmp(text(key), name)) return of_key(key);
    stop("a description lacks ", name);
    return NULL;
}

static bool is_null(const char *at) { return !strncmp(at, "null", 4); }

static int64_t number(const char *at) {
    char *end;
    int64_t found = strtoll(at, &end, 10);
    if (end == at || *end == '.' || found < 0) stop("no natural number: ", at);
    return found;
}

/* Tensors. */

static const struct {
    const char *name, *short_name;
    ONNXTensorElementDataType type;
    size_t size;
} TYPES[] = {
    {"float32", "F32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},
    {"float64", "F64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8},
    {"float16", "F16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2},
    {"bfloat16", "BF16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, 2},
    {"int64", "I64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},
    {"int32", "I32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4},
    {"uint8", "U8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 1},
    {"bool", "BOOL", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 1},
};

static Tensor tensor(const char *name, const char *json, const char *type) {
    Tensor made = {.name = name, .json = json};
    const char *called = text(find(json, type));
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (!strcmp(called, TYPES[i].name) || !strcmp(called, TYPES[i].short_name)) {
            made.type = TYPES[i].type;
            made.bytes = TYPES[i].size;
        }
    if (!made.bytes) stop("this type is not known here: ", called);
    for (const char *dim = first(find(json, "shape")); dim; dim = following(dim)) {
        if (made.rank == MOST_DIMS) stop("too many dimensions: ", name);
        made.shape[made.rank++] = number(dim);
        made.bytes *= (size_t)number(dim);
    }
    return made;
}

/* Returns a feed, with room for a batch. */
static Tensor feed(const char *json, const char *header, const char *data, size_t size,
                   int64_t batch, int64_t *rows) {
    const char *name = text(find(json, "name"));
    Tensor found = tensor(name, find(header, name), "dtype");
    const char *offsets = first(find(found.json, "data_offsets"));
    size_t begin = (size_t)number(offsets), dims = 0;
    if (begin > size || found.bytes > size - begin) stop("the data end too early: ", name);
    const char *type = text(find(json, "type"));
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (!strcmp(type, TYPES[i].name) && TYPES[i].type != found.type)
            stop("the data of a feed have another type: ", name);
    if (!found.rank || found.shape[0] < batch) stop("a feed has fewer rows than a batch: ", name);
    if (*rows && *rows != found.shape[0]) stop("a feed has another number of rows: ", name);
    *rows = found.shape[0];
    found.bytes = found.bytes / (size_t)*rows * (size_t)batch;
    found.shape[0] = batch;
    const char *shape = find(json, "shape");
    for (const char *dim = is_null(shape) ? NULL : first(shape); dim; dim = following(dim), dims++)
        if (dims == found.rank || (*dim >= '0' && *dim <= '9' && number(dim) != found.shape[dims]))
            stop("the data of a feed have another shape: ", name);
    if (!is_null(shape) && dims != found.rank) stop("the data of a feed have another shape: ", name);
    found.rows = data + begin;
    found.data = memory(found.bytes);
    return found;
}

/* Returns a variable; its value is a copy of what stands in the model. */
static Tensor variable(const char *name, const char *json, const char *model, size_t size) {
    Tensor found = tensor(name, json, "type");
    found.next = is_null(find(json, "next")) ? NULL : text(find(json, "next"));
    const char *place = first(find(json, "places"));
    if (!place) stop("model.onnx has no place for ", name);
    for (; place; place = following(place)) {
        size_t offset = (size_t)number(first(place));
        if ((size_t)number(following(first(place))) != found.bytes || offset > size ||
            found.bytes > size - offset)
            stop("step.json and model.onnx do not belong together: ", name);
        if (!found.data) found.data = memcpy(memory(found.bytes), model + offset, found.bytes);
    }
    return found;
}

int main(int count, char **arguments) {
    if (count != 6) stop("usage: train FOLDER DATA.safetensors BATCH STEPS OUTPUT.onnx", "");
    const char *folder = arguments[1];
    int64_t batch = number(arguments[3]), steps = number(arguments[4]), rows = 0;
    if (!batch) stop("a batch has at least one row", "");

    size_t json_size, model_size, data_size;
    const char *json = whole(read_file(path_of(folder, "step.json"), &json_size));
    char *model = read_file(path_of(folder, "model.onnx"), &model_size);
    char *data = read_file(arguments[2], &data_size);
    if (strcmp(text(find(json, "format")), "ortops.step") || number(find(json, "version")) != 1)
        stop("step.json is not of format 'ortops.step', version 1", "");
    if ((size_t)number(find(find(find(json, "files"), "model.onnx"), "bytes")) != model_size)
        stop("step.json and model.onnx do not belong together", "");
    uint64_t length = 0;
    if (data_size >= 8) memcpy(&length, data, 8);
    if (data_size < 8 || length > data_size - 8) stop("no safetensors: ", arguments[2]);
    const char *header = whole(memcpy(memory(length + 1), data + 8, length));

    ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    if (!ort) stop("the onnxruntime library is older than the header", "");
    OrtEnv *environment = NULL;
    OrtSessionOptions *options = NULL;
    OrtSession *session = NULL;
    OrtMemoryInfo *cpu = NULL;
    check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "train", &environment));
    check(ort->CreateSessionOptions(&options));
    check(ort->CreateSession(environment, path_of(folder, "step.onnx"), options, &session));
    check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &cpu));

    static Tensor inputs[MOST_NAMES];
    static const char *names[MOST_NAMES], *outputs[MOST_NAMES];
    size_t feeds = 0, used = 0, put_out = 1;
    const char *step = find(json, "step");
    if (is_null(find(step, "loss"))) stop("the training algorithm has no loss", "");
    outputs[0] = text(find(step, "loss"));
    for (const char *at = first(find(step, "feeds")); at; at = following(at)) {
        if (feeds == MOST_NAMES) stop("too many feeds", "");
        inputs[feeds++] = feed(at, header, data + 8 + length, data_size - 8 - length, batch, &rows);
    }
    used = feeds;
    for (const char *key = first(find(json, "variables")); key; key = following_key(key)) {
        if (used == MOST_NAMES - 1) stop("too many variables", "");
        Tensor made = variable(text(key), of_key(key), model, model_size);
        if (made.next) outputs[put_out++] = made.next;
        inputs[used++] = made;
    }
    size_t wanted = 0;
    check(ort->SessionGetInputCount(session, &wanted));
    if (wanted != used) stop("step.json and step.onnx do not belong together", "");
    for (size_t i = 0; i < used; i++) {
        Tensor *each = &inputs[i];
        names[i] = each->name;
        check(ort->CreateTensorWithDataAsOrtValue(
            cpu, each->data, each->bytes, each->shape, each->rank, each->type, &each->value));
    }

    for (int64_t done = 0; done < steps; done++) {
        static const OrtValue *given[MOST_NAMES];
        static OrtValue *results[MOST_NAMES];
        for (size_t i = 0; i < feeds; i++) {
            size_t number_of_batch = (size_t)(done % (rows / batch));
            memcpy(inputs[i].data, inputs[i].rows + number_of_batch * inputs[i].bytes,
                   inputs[i].bytes);
        }
        for (size_t i = 0; i < used; i++) given[i] = inputs[i].value;
        memset(results, 0, sizeof results);
        check(ort->Run(session, NULL, names, given, used, outputs, put_out, results));
        OrtTensorTypeAndShapeInfo *info = NULL;
        ONNXTensorElementDataType type;
        float *loss = NULL;
        check(ort->GetTensorTypeAndShape(results[0], &info));
        check(ort->GetTensorElementType(info, &type));
        if (type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) stop("the loss is not float32", "");
        check(ort->GetTensorMutableData(results[0], (void **)&loss));
        printf("step %lld loss %.9g\n", (long long)done + 1, *loss);
        ort->ReleaseTensorTypeAndShapeInfo(info);
        ort->ReleaseValue(results[0]);
        for (size_t i = feeds, next = 1; i < used; i++)
            if (inputs[i].next) {
                ort->ReleaseValue(inputs[i].value);
                inputs[i].value = results[next++];
            }
    }

    for (size_t i = feeds; i < used; i++) {
        void *present = NULL;
        check(ort->GetTensorMutableData(inputs[i].value, &present));
        const char *place = first(find(inputs[i].json, "places"));
        for (; place; place = following(place))
            memcpy(model + number(first(place)), present, inputs[i].bytes);
    }
    FILE *file = fopen(arguments[5], "wb");
    if (!file || fwrite(model, 1, model_size, file) != model_size || fclose(file))
        stop("cannot be written: ", arguments[5]);
    return 0;
}
