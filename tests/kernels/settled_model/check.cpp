// Launches as the arguments say; prints an answer for each question.
//   settles S, writes S, nothing S   a launch on stream S
//   pool S P                         one that writes new tokens to pool P
//   fresh S P                        one that does, and lets the next one start after its own wait
//   device N                         from now on
//   may-read S P, settled S          questions
//   elsewhere S P                    may-read, asked by another thread
//   ahead S P 0|1                    what may be read early: nothing, old or all; 1 if its queries are the new tokens
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "cuda/settled.h"

using tide::cuda::Ahead;
using tide::cuda::Effect;
using tide::cuda::Settled;

int main(int count, char** words) {
    int at = 1;
    const auto number = [&] { return std::strtol(words[at++], nullptr, 10); };
    const auto stream = [&] { return reinterpret_cast<cudaStream_t>(number()); };
    const auto pool = [&] { return reinterpret_cast<const void*>(number()); };
    const auto answer = [](bool yes) { std::puts(yes ? "yes" : "no"); };
    while (at < count) {
        const std::string word = words[at++];
        if (word == "device") {
            current_device = static_cast<int>(number());
            continue;
        }
        const cudaStream_t where = stream();
        if (word == "settles") Settled::note(where, Effect::kSettles);
        if (word == "writes") Settled::note(where, Effect::kWrites);
        if (word == "nothing") Settled::note(where, Effect::kNothing);
        if (word == "pool") Settled::note_pool(where, pool());
        if (word == "fresh") Settled::note_fresh(where, pool());
        if (word == "ahead") {
            const void* of = pool();
            const Ahead ahead = Settled::ahead(where, of, number() != 0);
            std::puts(ahead == Ahead::kAll ? "all" : ahead == Ahead::kOld ? "old" : "nothing");
        }
        if (word == "may-read") answer(Settled::may_read(where, pool()));
        if (word == "settled") answer(Settled::is_settled(where));
        if (word == "elsewhere") {
            const void* of = pool();
            std::thread([&] { answer(Settled::may_read(where, of)); }).join();
        }
    }
}
