/* A library with thread-local storage, to be loaded and unloaded under pressure. */
#include <stdint.h>
static __thread uint64_t counter;
static __thread char large[200000];
uint64_t module_step(void) {
    large[counter % sizeof large] = (char)counter;
    return ++counter;
}
