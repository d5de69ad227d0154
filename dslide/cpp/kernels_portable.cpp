#define DSLIDE_VECTOR_BYTES 16
#define DSLIDE_MR 4
#define DSLIDE_KERNELS kPortable
#define DSLIDE_NAME "portable"
#include "kernels.inc"
