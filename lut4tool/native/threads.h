// A pool of threads that sleep while there is nothing to do: spinning would take the cores from other runtimes.
#pragma once

#include <cstddef>
#include <functional>

namespace lut4tool {

// Run work(0) ... work(pieces - 1), each once, on this thread and up to `threads` - 1 others; return when all are done.
// Pieces are taken in order by whoever is free. Bounded by the machine. Callable from several threads, and after fork.
void parallel(std::size_t pieces, unsigned threads, const std::function<void(std::size_t)> &work);

}  // namespace lut4tool
