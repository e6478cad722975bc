// Mapped files that are cut while they are read: their pages become zeros and are marked, where a process would die.
#pragma once

#include <cstddef>

namespace lut4tool {

// Watch the map of a file, which begins at a page; the answer names it. Not at work on Windows: the answer is 0.
std::size_t watch_pages(const void *start, std::size_t size);

// Stop watching, before the map goes.
void forget_pages(std::size_t map);

// Whether a page of the map could not be read: the file was cut, or its disk failed.
bool lost_pages(std::size_t map);

}  // namespace lut4tool
