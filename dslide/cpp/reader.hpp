// The XC text parser ("N D L", then "l1,l2 f:v f:v ..." a point): knows neither Python nor files.
#pragma once

namespace dslide {}
