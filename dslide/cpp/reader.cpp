#include "reader.hpp"

namespace dslide {}
