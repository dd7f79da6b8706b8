/* A library that loads another one by name; its RUNPATH has the folder. */
#define _GNU_SOURCE
#include <dlfcn.h>
const char *outer_load(const char *name) { return dlopen(name, RTLD_NOW) ? 0 : dlerror(); }
