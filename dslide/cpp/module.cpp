// Registers the bindings; each bind_*.cpp does one part.
#include <pybind11/pybind11.h>

void bind_approximate(pybind11::module_& m);
void bind_core(pybind11::module_& m);
void bind_hidden(pybind11::module_& m);
void bind_probe(pybind11::module_& m);
void bind_reader(pybind11::module_& m);

PYBIND11_MODULE(_core, m) {
  m.doc() = "The native core of dslide.";
  bind_core(m);
  bind_approximate(m);
  bind_hidden(m);
  bind_probe(m);
  bind_reader(m);
}
