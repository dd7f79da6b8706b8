/* Modules that are loaded while the program runs: which malloc they find, and where they are searched for. */
#include "behaviour.h"
#include <dlfcn.h>

/* A module that searches its own libraries first frees a block that the program allocated. */
static void deep(void) {
    void *module = dlopen("./module.so", RTLD_NOW | RTLD_DEEPBIND);
    CHECK(module != NULL, "%s", dlerror());
    void (*drop)(void *) = (void (*)(void *))dlsym(module, "module_free");
    void *(*make)(size_t) = (void *(*)(size_t))dlsym(module, "module_malloc");
    CHECK(drop && make);
    for (size_t i = 0; i < 20000; i++) {
        char *one = malloc(100 + i), *other = make(100 + i);
        memset(one, 1, 100 + i);
        memset(other, 2, 100 + i);
        drop(one);
        free(realloc(other, 50 + i));
    }
}

/* For libraries that a library loads, its own RUNPATH is searched, not the program's and not zfolio's. */
static void by_caller(void) {
    void *outer = dlopen("./outer.so", RTLD_NOW);
    CHECK(outer != NULL, "%s", dlerror());
    const char *(*load)(const char *) = (const char *(*)(const char *))dlsym(outer, "outer_load");
    CHECK(load != NULL);
    const char *error = load("only_by_runpath.so");
    CHECK(error == NULL, "%s", error);
    CHECK(dlopen("only_by_runpath_too.so", RTLD_NOW) == NULL, "the program has no RUNPATH");
}

int main(int count, char **arguments) {
    const struct behaviour cases[] = {{"deep", deep}, {"by_caller", by_caller}};
    return CHOOSE(cases);
}
