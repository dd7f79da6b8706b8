/* A library that loads another one by name; its RUNPATH says where that is. */
#define _GNU_SOURCE
#include <dlfcn.h>
const char *outer_load(const char *name) { return dlopen(name, RTLD_NOW) ? 0 : dlerror(); }
