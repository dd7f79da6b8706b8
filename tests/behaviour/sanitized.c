/* A program with a sanitizer's runtime must get its arguments, and its exit status must be passed on. It prints its
 * arguments, and uses memory and a thread; the runtime reports an error if it did not see these being made. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 1 << 20 };

static void *sum(void *argument) {
    long total = 0;
    for (int i = 0; i < BYTES; i++) total += ((char *)argument)[i];
    return (void *)total;
}

int main(int count, char **words) {
    char *block = malloc(BYTES);
    memset(block, 3, BYTES);
    pthread_t thread;
    void *total;
    if (pthread_create(&thread, NULL, sum, block) != 0 || pthread_join(thread, &total) != 0) return 1;
    free(block);
    const char *loaded = getenv("LD_PRELOAD");
    printf("%ld, loaded first: %s;", (long)total, loaded ? loaded : "nothing");
    for (int i = 0; i < count; i++) printf(" '%s'", words[i]);
    printf("\n");
    return 7;
}
