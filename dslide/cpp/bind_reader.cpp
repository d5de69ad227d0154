#include <pybind11/pybind11.h>

#include "reader.hpp"

void bind_reader(pybind11::module_& module) { (void)module; }
