/* Pages from the operating system, given back to it on unmap. A mapping for huge pages is cut to 2 MB boundaries, since the kernel backs
 * only whole aligned 2 MB pieces with them. */
#define _GNU_SOURCE
#include "pages.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HUGE_PAGE = 2 << 20 };

void *fl_memory_map(size_t nbytes, int huge) {
    size_t extra = huge && nbytes >= HUGE_PAGE ? HUGE_PAGE : 0;
    if (nbytes == 0 || nbytes > SIZE_MAX - 2 * HUGE_PAGE) return NULL;
    char *p = mmap(NULL, nbytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (extra) {
        char *start = (char *)(((uintptr_t)p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
        size_t page = (size_t)sysconf(_SC_PAGESIZE), size = (nbytes + page - 1) / page * page;
        if (start > p) munmap(p, (size_t)(start - p));
        char *end = p + (nbytes + extra + page - 1) / page * page;
        if (end > start + size) munmap(start + size, (size_t)(end - (start + size)));
        p = start;
#if defined(MADV_HUGEPAGE)
        madvise(p, nbytes, MADV_HUGEPAGE);
#endif
    }
    return p;
}

void fl_memory_unmap(void *address, size_t nbytes) { munmap(address, nbytes); }
