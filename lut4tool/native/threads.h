// A pool of threads that soon sleep where there is nothing to do: spinning on would take the cores from other runtimes.
#pragma once

#include <cstddef>
#include <functional>

namespace lut4tool {

// Run work(0) ... work(pieces - 1), each once, on this thread and up to `threads` - 1 others; return when all are done.
// Pieces are taken in order by whoever is free. Bounded by the machine. Callable from several threads, and after fork.
void parallel(std::size_t pieces, unsigned threads, const std::function<void(std::size_t)> &work);

// Run work(phase, piece, worker) for every piece of each phase, none before the whole phase before it is done. A worker
// (below `threads`) has its own pieces, the same in every phase, so that they stay in its core's cache; it takes others'
// where they are late, so that a thread which the system does not run delays one piece.
void parallel_phases(std::size_t phases, std::size_t pieces, unsigned threads,
                     const std::function<void(std::size_t phase, std::size_t piece, std::size_t worker)> &work);

}  // namespace lut4tool
