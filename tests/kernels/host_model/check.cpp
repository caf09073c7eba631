// Launches as the arguments say, on a runtime that is a model; prints an answer for each question.
//   publishes S, writes S, none S, weights S   a launch on stream S
//   cluster S N                      one with clusters of N
//   pool S P                         what was launched last writes new tokens to pool P
//   new-tokens S P                   the same, and it publishes what was before it
//   foreign S                        somebody else launches on S
//   capture S, end S                 the stream is captured from now on, and no more
//   device N                         from now on
//   code N, code90a N                the loaded code of the device was compiled for N; 0: there is none
//   overlaps S, clustered S          questions about the last launch
//   arch S, sm90a S                  questions about the device
//   may-read S P, published S        questions about the next launch
//   elsewhere S P                    may-read, asked by another thread
//   early S P 0|1                    what may be read early: none, old or all; 1 if its queries are the new tokens
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "cuda/common/launch.h"

namespace tide::cuda {

static const char portable = 0, sm90a = 0;
const void* portable_probe() {
    return &portable;
}
const void* sm90a_probe() {
    return &sm90a;
}

}  // namespace tide::cuda

using namespace tide::cuda;

static void kernel() {}

int main(int count, char** words) {
    int at = 1;
    fake.compiled_for = {{portable_probe(), 90}, {sm90a_probe(), 90}};
    const auto number = [&] { return std::strtol(words[at++], nullptr, 10); };
    const auto pool = [&] { return reinterpret_cast<const void*>(number()); };
    const auto answer = [](bool yes) { std::puts(yes ? "yes" : "no"); };
    const auto set_code = [&](const void* probe) {
        const int arch = static_cast<int>(number());
        if (arch == 0) {
            fake.compiled_for.erase(probe);
        } else {
            fake.compiled_for[probe] = arch;
        }
    };
    while (at < count) {
        const std::string word = words[at++];
        if (word == "device") {
            fake.device = static_cast<int>(number());
            continue;
        }
        if (word == "code" || word == "code90a") {
            set_code(word == "code" ? portable_probe() : sm90a_probe());
            continue;
        }
        const cudaStream_t stream = reinterpret_cast<cudaStream_t>(number());
        const auto run = [&](Effect effect, int cluster = 1) {
            LaunchShape shape = {1, 32};
            shape.effect = effect;
            shape.cluster = cluster;
            launch("op", kernel, shape, stream);
        };
        try {
            if (word == "publishes") run(Effect::kPublishes);
            if (word == "writes") run(Effect::kWrites);
            if (word == "none") run(Effect::kNone);
            if (word == "weights") run(Effect::kWeights);
            if (word == "cluster") run(Effect::kNone, static_cast<int>(number()));
            if (word == "arch") std::printf("%d\n", current_device("op").arch);
            if (word == "sm90a") answer(current_device("op").sm90a);
        } catch (const std::runtime_error& error) {
            std::puts("refused");
        }
        if (word == "pool") StreamHistory::record_pool(stream, pool());
        if (word == "new-tokens") {
            run(Effect::kPublishes);
            StreamHistory::record_new_tokens(stream, pool());
        }
        if (word == "foreign" && fake.captures[stream].id != 0) fake.add_node(stream);
        if (word == "capture") fake.captures[stream] = {fake.next_capture++, 0, nullptr};
        if (word == "end") fake.captures[stream] = {};
        if (word == "overlaps") answer(fake.overlaps);
        if (word == "clustered") answer(fake.cluster > 1);
        if (word == "early") {
            const void* of = pool();
            const EarlyReads early = StreamHistory::early_reads(stream, of, number() != 0);
            std::puts(early == EarlyReads::kAll ? "all" : early == EarlyReads::kOldPages ? "old" : "none");
        }
        if (word == "may-read") answer(StreamHistory::may_read(stream, pool()));
        if (word == "published") answer(StreamHistory::is_published(stream));
        if (word == "elsewhere") {
            const void* of = pool();
            std::thread([&] { answer(StreamHistory::may_read(stream, of)); }).join();
        }
    }
}
