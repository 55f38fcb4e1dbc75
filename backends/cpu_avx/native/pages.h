/* Pages for weights, caches and activations. */
#ifndef FL_PAGES_H
#define FL_PAGES_H
#include <stddef.h>

/* Zeroed, 4,096-byte aligned. huge: asks for 2 MB pages (decode reads all weights once a step: with small pages the address
 * translation alone costs about a tenth of the bandwidth). NULL if there is no memory. */
void *fl_memory_map(size_t nbytes, int huge);
void fl_memory_unmap(void *address, size_t nbytes);

#endif
