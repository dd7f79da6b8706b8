/* own_malloc, but the first blocks are in no mapping, so that none of them are managed. */
#define FIRST
#include "own_malloc.c"
