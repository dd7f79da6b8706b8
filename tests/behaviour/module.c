/* A library with thread-local storage, which is loaded and unloaded under pressure. */
#include <stdint.h>
static __thread uint64_t counter;
static __thread char large[200000];
uint64_t module_step(void) {
    large[counter % sizeof large] = (char)counter;
    return ++counter;
}

/* The malloc that the module finds. */
#include <stdlib.h>
void *module_malloc(size_t bytes) { return malloc(bytes); }
void module_free(void *block) { free(block); }
