// A library with the interface of NCCL for one rank, in which the call that the environment names
// fails or never ends. It prints how its communicators end.

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7 };

typedef struct {
    char bytes[128];
} Id;

typedef struct {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
} Settings;

typedef struct {
    int state;
    int polls;
} Communicator;

static int faulty(const char *call, const char *fault) {
    const char *named = getenv("FAKE_NCCL_FAULT");
    size_t length = strlen(call);
    return named && strncmp(named, call, length) == 0 && strcmp(named + length, fault) == 0;
}

// Begins a call that is done after a few polls, unless it has a fault.
static int begin(Communicator *communicator, const char *call) {
    if (faulty(call, " is refused")) return INVALID_ARGUMENT;
    communicator->polls = faulty(call, " never ends") ? -1 : 3;
    communicator->state = faulty(call, " loses a rank") ? REMOTE_ERROR : SUCCESS;
    return IN_PROGRESS;
}

int ncclGetVersion(int *version) { return *version = 22304, SUCCESS; }

int ncclGetUniqueId(Id *id) { return memset(id->bytes, 7, sizeof id->bytes), SUCCESS; }

int ncclCommInitRankConfig(Communicator **made, int size, Id id, int rank, Settings *settings) {
    int known = settings->magic == 0xcafebeef && settings->version >= 21400 && settings->blocking == 0;
    if (!known || settings->size != sizeof(Settings) || size != 1 || rank != 0 || id.bytes[127] != 7)
        return INVALID_ARGUMENT;
    *made = calloc(1, sizeof **made);
    return begin(*made, "join");
}

int ncclCommGetAsyncError(Communicator *communicator, int *state) {
    *state = communicator->polls == 0 ? communicator->state : IN_PROGRESS;
    if (communicator->polls > 0) communicator->polls--;
    return SUCCESS;
}

int ncclCommFinalize(Communicator *communicator) { return begin(communicator, "finalize"); }

int ncclCommDestroy(Communicator *communicator) {
    free(communicator);
    puts("destroyed");
    return fflush(stdout);
}

int ncclCommAbort(Communicator *communicator) {
    free(communicator);
    puts("aborted");
    return fflush(stdout);
}

static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

// The result of one rank is its own values, whatever the operation.
static int copy(size_t from, size_t to, size_t count, int element, Communicator *communicator, void *stream) {
    if (communicator->polls || element < 0 || element > 9) return INTERNAL_ERROR;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*copy)(size_t, size_t, size_t, void *) = driver ? dlsym(driver, "cuMemcpyDtoDAsync_v2") : NULL;
    if (!copy) return INTERNAL_ERROR;
    if (from != to && copy(to, from, count * SIZES[element], stream)) return INTERNAL_ERROR;
    return begin(communicator, "operation");
}

int ncclAllReduce(size_t from, size_t to, size_t count, int element, int op, Communicator *c, void *stream) {
    return op < 0 || op > 4 ? INVALID_ARGUMENT : copy(from, to, count, element, c, stream);
}

int ncclReduceScatter(size_t from, size_t to, size_t count, int element, int op, Communicator *c, void *stream) {
    return op < 0 || op > 4 ? INVALID_ARGUMENT : copy(from, to, count, element, c, stream);
}

int ncclBroadcast(size_t from, size_t to, size_t count, int element, int root, Communicator *c, void *stream) {
    return root ? INVALID_ARGUMENT : copy(from, to, count, element, c, stream);
}

int ncclAllGather(size_t from, size_t to, size_t count, int element, Communicator *c, void *stream) {
    return copy(from, to, count, element, c, stream);
}
