/* Which instruction-set variants this machine, its operating system and this build can run. */
#ifndef FL_ISA_H
#define FL_ISA_H
#include "kernels.h"

enum { FL_ISA_BASELINE, FL_ISA_AVX2, FL_ISA_AVX512, FL_ISA_AMX, FL_ISA_COUNT };

const char *fl_isa_name(int isa);
/* NULL if the variant can run here, else why not: a static string. Asks the kernel for the AMX permission once, on the first question. */
const char *fl_isa_missing(int isa);

#endif
