/* Trains with onnxruntime's C API, from a folder that `ortops export-step` wrote.

   train FOLDER DATA.safetensors BATCH STEPS OUTPUT.onnx

   DATA has an array for each feed of the step, with one row per sample; batches are read in order.
   Prints the loss of each step, and writes the trained state to a copy of FOLDER/model.onnx, which
   onnxruntime runs and from which ortops.TrainingSession resumes. README.md explains how to build
   this program. For little-endian machines. */

#include "step.h"

int main(int count, char **arguments) {
    if (count != 6) stop("usage: train FOLDER DATA.safetensors BATCH STEPS OUTPUT.onnx", "");
    size_t batch = number(arguments[3]), steps = number(arguments[4]), rows = 0;
    if (!batch) stop("BATCH must be an integer >= 1, got ", arguments[3]);

    /* Read the folder and the data. */
    char *path;
    size_t size, model_size;
    const char *json = whole(file_of(arguments[1], "step.json", NULL, &path, &size));
    if (strcmp(text(find(json, "format")), "ortops.step") || number(find(json, "version")) != 1)
        stop("step.json must have the format 'ortops.step', version 1", "");
    char *model = file_of(arguments[1], "model.onnx", json, &path, &model_size);
    free(file_of(arguments[1], "step.onnx", json, &path, &size));
    char *data = read_file(arguments[2], &size);
    uint64_t length = 0;
    if (size >= 8) memcpy(&length, data, 8);
    if (size < 8 || length > size - 8) stop("not a safetensors file: ", arguments[2]);
    const char *header = whole(memcpy(memory(length + 1), data + 8, length));

    ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    if (!ort) stop("the onnxruntime library is older than the header", "");
    OrtEnv *environment = NULL;
    OrtSessionOptions *options = NULL;
    OrtSession *session = NULL;
    OrtMemoryInfo *cpu = NULL;
    check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "train", &environment));
    check(ort->CreateSessionOptions(&options));
    check(ort->CreateSession(environment, path, options, &session));
    check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &cpu));

    /* The inputs of a step: feeds, then variables. The outputs: the loss, then next values. */
    enum { MOST = 4096 };
    static Tensor inputs[MOST];
    static const char *names[MOST], *outputs[MOST];
    size_t feeds = 0, used = 0, put_out = 1;
    const char *step = find(json, "step");
    if (is_null(find(step, "loss"))) stop("the training algorithm has no loss", "");
    outputs[0] = text(find(step, "loss"));
    for (const char *at = first(find(step, "feeds")); at && used < MOST - 1; at = following(at))
        inputs[used++] = feed(at, header, data + 8 + length, size - 8 - length, batch, &rows);
    feeds = used;
    for (const char *key = first(find(json, "variables")); key; key = following_key(key)) {
        if (used == MOST - 1) stop("too many inputs", "");
        inputs[used++] = variable(text(key), of_key(key), model, model_size);
        if (inputs[used - 1].next) outputs[put_out++] = inputs[used - 1].next;
    }
    size_t wanted = 0; /* checked, because onnxruntime treats missing inputs of optional node inputs as absent */
    check(ort->SessionGetInputCount(session, &wanted));
    if (wanted != used) stop("step.json and step.onnx do not belong together", "");
    for (size_t i = 0; i < used; i++) {
        Tensor *each = &inputs[i];
        names[i] = each->name;
        check(ort->CreateTensorWithDataAsOrtValue(
            cpu, each->data, each->bytes, each->shape, each->rank, each->type, &each->value));
    }

    for (size_t done = 0; done < steps; done++) {
        static const OrtValue *given[MOST];
        static OrtValue *results[MOST];
        for (size_t i = 0; i < feeds; i++)
            memcpy(inputs[i].data, inputs[i].rows + done % (rows / batch) * inputs[i].bytes,
                   inputs[i].bytes);
        for (size_t i = 0; i < used; i++) given[i] = inputs[i].value;
        memset(results, 0, sizeof results);
        check(ort->Run(session, NULL, names, given, used, outputs, put_out, results));
        printf("step %zu loss %.9g\n", done + 1, loss_of(results[0]));
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
        for (const char *place = first(inputs[i].places); place; place = following(place))
            memcpy(model + number(first(place)), present, inputs[i].bytes);
    }
    FILE *file = fopen(arguments[5], "wb");
    if (!file || fwrite(model, 1, model_size, file) != model_size || fclose(file))
        stop("cannot write ", arguments[5]);
    return 0;
}
