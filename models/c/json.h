/* A JSON reader without copies: a value is a pointer to its text. Also: errors, memory and files. */

#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void stop(const char *problem, const char *which) {
    fprintf(stderr, "train: %s%.500s\n", problem, which);
    exit(1);
}

static void *memory(size_t bytes) {
    void *found = calloc(bytes ? bytes : 1, 1);
    if (!found) stop("out of memory", "");
    return found;
}

static char *read_file(const char *path, size_t *size) { /* with a terminating zero */
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) stop("cannot read ", path);
    *size = (size_t)ftell(file);
    char *bytes = memory(*size + 1);
    rewind(file);
    if (fread(bytes, 1, *size, file) != *size) stop("cannot read ", path);
    fclose(file);
    return bytes;
}

static uint32_t crc32(const char *bytes, size_t size) {
    uint32_t sum = 0xffffffff;
    for (; size; size--) {
        sum ^= (unsigned char)*bytes++;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320 : 0);
    }
    return ~sum;
}

static const char *blank(const char *at) { return at + strspn(at, " \t\r\n"); }

static const char *behind(const char *at) { /* the text after a value */
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
        if (!length) stop("invalid JSON: ", at);
        return blank(at + length);
    }
    if (!*at) stop("JSON ends unexpectedly", "");
    return blank(at + 1);
}

static const char *whole(const char *text) { /* a value without trailing text */
    text = blank(text);
    if (*behind(text)) stop("invalid JSON: ", behind(text));
    return text;
}

static const char *first(const char *container) { /* the first key or element; NULL if empty */
    if (*container != '{' && *container != '[') stop("not an object or array: ", container);
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
    if (*at != '"' || at[1 + length] != '"') stop("not a string without escapes: ", at);
    return memcpy(memory(length + 1), at + 1, length);
}

static const char *find(const char *object, const char *name) {
    for (const char *key = first(object); key; key = following_key(key))
        if (!strcmp(text(key), name)) return of_key(key);
    stop("missing key: ", name);
    return NULL;
}

static bool is_null(const char *at) { return !strncmp(at, "null", 4); }

static size_t number(const char *at) {
    char *end;
    long long found = strtoll(at, &end, 10);
    if (end == at || *end == '.' || found < 0) stop("not an integer >= 0: ", at);
    return (size_t)found;
}
