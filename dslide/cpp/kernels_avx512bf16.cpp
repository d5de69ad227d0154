#define DSLIDE_VECTOR_BYTES 64
#define DSLIDE_MR 8
#define DSLIDE_BF16
#define DSLIDE_KERNELS kAvx512Bf16
#define DSLIDE_NAME "avx512bf16"
#include "kernels.inc"
