#include "kernels.hpp"

#include <cstdlib>
#include <stdexcept>

namespace dslide {

extern const Kernels kPortable;
#ifdef DSLIDE_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#ifdef DSLIDE_AVX512BF16
extern const Kernels kAvx512Bf16;
#endif
#endif

std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> found;
#ifdef DSLIDE_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
#ifdef DSLIDE_AVX512BF16
    if (__builtin_cpu_supports("avx512bf16")) found.push_back(&kAvx512Bf16);
#endif
    found.push_back(&kAvx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&kAvx2);
#endif
  found.push_back(&kPortable);
  return found;
}

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const auto found = supported_kernels();
    const char* wish = std::getenv("DSLIDE_ISA");
    if (wish == nullptr || *wish == '\0') return *found.front();
    for (const Kernels* k : found)
      if (std::string(wish) == k->name) return *k;
    std::string names;
    for (const Kernels* k : found) names += std::string(names.empty() ? "" : ", ") + k->name;
    throw std::invalid_argument("DSLIDE_ISA=" + std::string(wish) + " is not supported here; choose from: " + names);
  }();
  return chosen;
}

}  // namespace dslide
