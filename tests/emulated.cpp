// Calls functions of libraries for another architecture, for a process that runs on this one: tests/emulated.py.
//
// The memory of that process appears here, page by page, at the addresses that it has there, as soon as something reads
// it. What a call has changed is written back after it.

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

extern "C" void omp_set_num_threads(int);

struct LayoutRow {  // common/layout.h
    const char *name;
    int64_t offset, size;
};

constexpr uint64_t PAGE = 4096;
constexpr int MOST_PAGES = 1 << 18;  // of a call

static int memory;  // of the other process
static char *before;  // [MOST_PAGES][PAGE], as the pages were
static uint64_t pages[MOST_PAGES];
static int count;
static std::atomic_flag lock = ATOMIC_FLAG_INIT;

static void fail(const char *what, uint64_t address) {
    char message[200];
    const int length = snprintf(message, sizeof message, "error %s %llx\n", what, (unsigned long long)address);
    _exit(write(1, message, length) == length ? 3 : 4);
}

static void fetch(int, siginfo_t *info, void *) {
    const uint64_t address = (uint64_t)info->si_addr & ~(PAGE - 1);
    while (lock.test_and_set()) continue;
    bool is_there = false;  // by another thread
    for (int i = count; i-- > 0 && !is_there;) is_there = pages[i] == address;
    if (!is_there) {
        if (count == MOST_PAGES) fail("too many pages", address);
        char *copy = before + count * PAGE;
        if (pread(memory, copy, PAGE, address) != int64_t(PAGE)) fail("no such address", (uint64_t)info->si_addr);
        void *reserved = mmap((void *)address, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (reserved != (void *)address) fail("address taken", address);
        // Moved there with its content, since other threads read and write it from then on.
        void *page = mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memcpy(page, copy, PAGE);
        if (mremap(page, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, reserved) != reserved) fail("cannot move", address);
        pages[count++] = address;
    }
    lock.clear();
}

// For all libraries. The C library's clears cache lines by an instruction (DC ZVA) that qemu cannot repeat where it
// meets a page that is not there yet.
extern "C" __attribute__((optimize("no-tree-loop-distribute-patterns"))) void *memset(void *to, int byte, size_t size) {
    for (size_t i = 0; i < size; i++) ((char *)to)[i] = byte;
    return to;
}

static void write_back() {
    for (int i = 0; i < count; i++) {
        const char *now = (const char *)pages[i], *then = before + i * PAGE;
        for (uint64_t at = 0, end; at < PAGE; at = end) {
            constexpr uint64_t LINE = 64;
            end = at + LINE;
            if (!memcmp(now + at, then + at, LINE)) continue;
            uint64_t first = at, last = end;
            while (now[first] == then[first]) first++;
            while (now[last - 1] == then[last - 1]) last--;
            if (pwrite(memory, now + first, last - first, pages[i] + first) != int64_t(last - first))
                fail("cannot write", pages[i] + first);
        }
        munmap((void *)pages[i], PAGE);
    }
    count = 0;
}

int main(int, char **arguments) {
    memory = open((std::string("/proc/") + arguments[1] + "/mem").c_str(), O_RDWR);
    if (memory < 0) fail("no access to the memory of the process", errno);
    before = (char *)mmap(nullptr, MOST_PAGES * PAGE, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct sigaction action = {};
    action.sa_sigaction = fetch;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    char command[8], text[4096];
    unsigned long long a[8];
    while (scanf("%7s", command) == 1) {
        if (!strcmp(command, "open")) {
            if (scanf("%4095s", text) != 1) return 1;
            void *library = dlopen(text, RTLD_NOW | RTLD_LOCAL);
            if (!library) fail(dlerror(), 0);
            printf("%llx\n", (unsigned long long)library);
        } else if (!strcmp(command, "symbol")) {
            if (scanf("%llx %4095s", a, text) != 2) return 1;
            printf("%llx\n", (unsigned long long)dlsym((void *)a[0], text));
        } else if (!strcmp(command, "layouts")) {
            if (scanf("%llx", a) != 1) return 1;
            for (const LayoutRow *row = ((const LayoutRow *(*)())a[0])(); row->name; row++)
                printf("%s %lld %lld ", row->name, (long long)row->offset, (long long)row->size);
            printf("\n");
        } else {  // call: function, threads, arguments
            for (auto &value : a)
                if (scanf("%llx", &value) != 1) return 1;
            omp_set_num_threads(a[1]);
            const long long result = ((long long (*)(long long, long long, long long, long long, long long))a[0])(
                a[2], a[3], a[4], a[5], a[6]);
            write_back();
            printf("%llx\n", (unsigned long long)result);
        }
        fflush(stdout);
    }
}
