/* Fault injection for file and socket calls, to be loaded with LD_PRELOAD.
 *
 * Environment variables, read when the library is loaded and by faults_configure():
 *
 *   FAULTS_PATH    absolute path prefix of the files concerned; unset: no file call is touched
 *   FAULTS_CALLS   comma-separated kinds of calls: open (for writing), write, sync, rename, unlink, link, truncate,
 *                  mkdir, read; of sockets: accept, send, recv
 *   FAULTS_AT      number of the first call that fails, from 1; 0 or unset: none (calls are only counted)
 *   FAULTS_TIMES   how many calls fail from there on (default 1); -1: all
 *   FAULTS_ERRNO   the error to return
 *   FAULTS_SIGNAL  instead of an error: a signal to send to this process at that call
 *   FAULTS_WHEN    before, middle (of a write: half of it is written) or after (the default is before)
 *   FAULTS_SHORT   1: write, read, send or recv only a part; with FAULTS_ERRNO, what follows fails (a full disk)
 *   FAULTS_CLOCK   seconds by which the wall clock is stepped; FAULTS_CLOCK_AFTER milliseconds from now
 *
 * faults_state() returns a page shared with forked children: calls counted, faults injected, calls by kind, and
 * the first injected fault in words.
 */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, SYNC = 4, RENAME = 8, UNLINK = 16, LINK = 32, TRUNCATE = 64, MKDIR = 128, READ = 256,
       ACCEPT = 512, SEND = 1024, RECV = 2048 };
static const struct { const char *name; int kind; } KINDS[] = {
    {"open", OPEN}, {"write", WRITE}, {"sync", SYNC}, {"rename", RENAME}, {"unlink", UNLINK}, {"link", LINK},
    {"truncate", TRUNCATE}, {"mkdir", MKDIR}, {"read", READ}, {"accept", ACCEPT}, {"send", SEND}, {"recv", RECV}};

struct state { atomic_long calls, injected, by_kind[16]; char first[512]; };
static struct state *shared;
static char prefix[PATH_MAX];
static size_t prefix_size;
static int kinds, error_number, signal_number, is_short, pid;
static enum { BEFORE, MIDDLE, AFTER } when;
static long first, times;
static double step;
static struct timespec step_at;

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

struct state *faults_state(void) { return shared; }

void faults_configure(void) {
    const char *text = getenv("FAULTS_PATH"), *calls = getenv("FAULTS_CALLS"), *at = getenv("FAULTS_WHEN");
    kinds = 0;
    snprintf(prefix, sizeof prefix, "%s", text ? text : "");
    prefix_size = strlen(prefix);
    first = number("FAULTS_AT", 0);
    times = number("FAULTS_TIMES", 1);
    error_number = (int)number("FAULTS_ERRNO", 0);
    signal_number = (int)number("FAULTS_SIGNAL", 0);
    is_short = (int)number("FAULTS_SHORT", 0);
    when = at && !strcmp(at, "after") ? AFTER : at && !strcmp(at, "middle") ? MIDDLE : BEFORE;
    pid = getpid();
    step = 0;
    if ((text = getenv("FAULTS_CLOCK")) && *text) {
        REAL(clock_gettime)(CLOCK_MONOTONIC, &step_at);
        long wait = number("FAULTS_CLOCK_AFTER", 0);
        step_at.tv_sec += wait / 1000;
        step_at.tv_nsec += wait % 1000 * 1000000;
        step = atof(text);
    }
    atomic_store(&shared->calls, 0);
    atomic_store(&shared->injected, 0);
    for (int i = 0; i < 16; i++) atomic_store(&shared->by_kind[i], 0);
    shared->first[0] = 0;
    for (size_t i = 0; calls && i < sizeof KINDS / sizeof *KINDS; i++) {
        const char *found = strstr(calls, KINDS[i].name);
        if (found) kinds |= KINDS[i].kind;
    }
}

__attribute__((constructor)) static void start(void) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) abort();
    faults_configure();
}

/* --- which calls --- */

static const char *absolute(int folder, const char *path, char *buffer) {
    if (!path) return "";
    if (path[0] == '/') return path;
    char link[64];
    ssize_t size;
    if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    size = readlink(link, buffer, PATH_MAX - 1);
    if (size < 0) return path;
    snprintf(buffer + size, PATH_MAX - size, "/%s", path);
    return buffer;
}

static const char *path_of(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, buffer, PATH_MAX - 1);
    buffer[size < 0 ? 0 : size] = 0;
    return buffer;
}

/* Whether this call is to fail. */
static int strikes(int kind, const char *path) {
    if (!(kinds & kind) || getpid() != pid) return 0; /* children that a verb starts are spared */
    if (kind < ACCEPT && (!prefix_size || strncmp(path, prefix, prefix_size))) return 0;
    long call = atomic_fetch_add(&shared->calls, 1) + 1;
    atomic_fetch_add(&shared->by_kind[__builtin_ctz(kind)], 1);
    if (!first || call < first || (times >= 0 && call >= first + times)) return 0;
    const char *name = "?";
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        if (KINDS[i].kind == kind) name = KINDS[i].name;
    if (!atomic_fetch_add(&shared->injected, 1))
        snprintf(shared->first, sizeof shared->first, "%s %s", name, kind < ACCEPT ? path : "");
    return 1;
}

static int on_path(int kind, int folder, const char *path) {
    char buffer[PATH_MAX];
    return kinds & kind ? strikes(kind, absolute(folder, path, buffer)) : 0;
}

static int on_file(int kind, int fd) {
    char buffer[PATH_MAX];
    return kinds & kind ? strikes(kind, path_of(fd, buffer)) : 0;
}

static void send_signal(void) { kill(getpid(), signal_number); }

/* For calls that transfer no data. */
#define SIMPLE(struck, call) \
    do { \
        if (!(struck)) return call; \
        if (!signal_number) { errno = error_number; return -1; } \
        if (when != AFTER) { send_signal(); return call; } \
        __typeof__(call) result = call; \
        int saved = errno; \
        send_signal(); \
        errno = saved; \
        return result; \
    } while (0)

/* For calls that transfer data: `part` transfers about half of it. */
#define TRANSFER(struck, size, part, call) \
    do { \
        if (!(struck)) return call; \
        if (signal_number) { \
            if (when == BEFORE) { send_signal(); return call; } \
            ssize_t result = when == MIDDLE && (size) > 1 ? part : call; \
            int saved = errno; \
            send_signal(); \
            errno = saved; \
            return result; \
        } \
        if (is_short && (size) > 1 && (!error_number || atomic_load(&shared->injected) == 1)) return part; \
        if (is_short && !error_number) return call; \
        errno = error_number; \
        return -1; \
    } while (0)

/* --- files --- */

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT; }
#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE; SIMPLE(writes(flags) && on_path(OPEN, AT_FDCWD, path), REAL(open)(path, flags, mode)); }
int open64(const char *path, int flags, ...) { MODE; SIMPLE(writes(flags) && on_path(OPEN, AT_FDCWD, path), REAL(open64)(path, flags, mode)); }
int openat(int folder, const char *path, int flags, ...) { MODE; SIMPLE(writes(flags) && on_path(OPEN, folder, path), REAL(openat)(folder, path, flags, mode)); }
int openat64(int folder, const char *path, int flags, ...) { MODE; SIMPLE(writes(flags) && on_path(OPEN, folder, path), REAL(openat64)(folder, path, flags, mode)); }
int creat(const char *path, mode_t mode) { SIMPLE(on_path(OPEN, AT_FDCWD, path), REAL(creat)(path, mode)); }
int mkdir(const char *path, mode_t mode) { SIMPLE(on_path(MKDIR, AT_FDCWD, path), REAL(mkdir)(path, mode)); }
int mkdirat(int folder, const char *path, mode_t mode) { SIMPLE(on_path(MKDIR, folder, path), REAL(mkdirat)(folder, path, mode)); }

ssize_t write(int fd, const void *data, size_t size) { TRANSFER(on_file(WRITE, fd), size, REAL(write)(fd, data, size / 2), REAL(write)(fd, data, size)); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { TRANSFER(on_file(WRITE, fd), size, REAL(pwrite)(fd, data, size / 2, at), REAL(pwrite)(fd, data, size, at)); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { TRANSFER(on_file(WRITE, fd), size, REAL(pwrite64)(fd, data, size / 2, at), REAL(pwrite64)(fd, data, size, at)); }
ssize_t writev(int fd, const struct iovec *parts, int count) { TRANSFER(on_file(WRITE, fd), count, REAL(writev)(fd, parts, count / 2), REAL(writev)(fd, parts, count)); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { TRANSFER(on_file(WRITE, fd), count, REAL(pwritev)(fd, parts, count / 2, at), REAL(pwritev)(fd, parts, count, at)); }
ssize_t sendfile(int to, int from, off_t *at, size_t size) { TRANSFER(on_file(WRITE, to), size, REAL(sendfile)(to, from, at, size / 2), REAL(sendfile)(to, from, at, size)); }
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) { TRANSFER(on_file(WRITE, to), size, REAL(sendfile64)(to, from, at, size / 2), REAL(sendfile64)(to, from, at, size)); }
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) { TRANSFER(on_file(WRITE, to), size, REAL(copy_file_range)(from, a, to, b, size / 2, flags), REAL(copy_file_range)(from, a, to, b, size, flags)); }
ssize_t read(int fd, void *data, size_t size) { TRANSFER(on_file(READ, fd), size, REAL(read)(fd, data, size / 2), REAL(read)(fd, data, size)); }
ssize_t pread(int fd, void *data, size_t size, off_t at) { TRANSFER(on_file(READ, fd), size, REAL(pread)(fd, data, size / 2, at), REAL(pread)(fd, data, size, at)); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { TRANSFER(on_file(READ, fd), size, REAL(pread64)(fd, data, size / 2, at), REAL(pread64)(fd, data, size, at)); }

int fsync(int fd) { SIMPLE(on_file(SYNC, fd), REAL(fsync)(fd)); }
int fdatasync(int fd) { SIMPLE(on_file(SYNC, fd), REAL(fdatasync)(fd)); }
int ftruncate(int fd, off_t size) { SIMPLE(on_file(TRUNCATE, fd), REAL(ftruncate)(fd, size)); }
int ftruncate64(int fd, off64_t size) { SIMPLE(on_file(TRUNCATE, fd), REAL(ftruncate64)(fd, size)); }
int posix_fallocate(int fd, off_t at, off_t size) { if (on_file(WRITE, fd) && !signal_number) return error_number; return REAL(posix_fallocate)(fd, at, size); }
int posix_fallocate64(int fd, off64_t at, off64_t size) { if (on_file(WRITE, fd) && !signal_number) return error_number; return REAL(posix_fallocate64)(fd, at, size); }
int fallocate(int fd, int mode, off_t at, off_t size) { SIMPLE(on_file(WRITE, fd), REAL(fallocate)(fd, mode, at, size)); }
int rename(const char *from, const char *to) { SIMPLE(on_path(RENAME, AT_FDCWD, to), REAL(rename)(from, to)); }
int renameat(int a, const char *from, int b, const char *to) { SIMPLE(on_path(RENAME, b, to), REAL(renameat)(a, from, b, to)); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { SIMPLE(on_path(RENAME, b, to), REAL(renameat2)(a, from, b, to, flags)); }
int link(const char *from, const char *to) { SIMPLE(on_path(LINK, AT_FDCWD, to), REAL(link)(from, to)); }
int linkat(int a, const char *from, int b, const char *to, int flags) { SIMPLE(on_path(LINK, b, to), REAL(linkat)(a, from, b, to, flags)); }
int unlink(const char *path) { SIMPLE(on_path(UNLINK, AT_FDCWD, path), REAL(unlink)(path)); }
int unlinkat(int folder, const char *path, int flags) { SIMPLE(on_path(UNLINK, folder, path), REAL(unlinkat)(folder, path, flags)); }
int remove(const char *path) { SIMPLE(on_path(UNLINK, AT_FDCWD, path), REAL(remove)(path)); }
int rmdir(const char *path) { SIMPLE(on_path(UNLINK, AT_FDCWD, path), REAL(rmdir)(path)); }

/* --- sockets --- */

int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags) { SIMPLE(strikes(ACCEPT, ""), REAL(accept4)(fd, address, size, flags)); }
int accept(int fd, struct sockaddr *address, socklen_t *size) { SIMPLE(strikes(ACCEPT, ""), REAL(accept)(fd, address, size)); }
ssize_t send(int fd, const void *data, size_t size, int flags) { TRANSFER(strikes(SEND, ""), size, REAL(send)(fd, data, size / 2, flags), REAL(send)(fd, data, size, flags)); }
ssize_t recv(int fd, void *data, size_t size, int flags) { TRANSFER(strikes(RECV, ""), size, REAL(recv)(fd, data, size > 64 ? 7 : size / 2, flags), REAL(recv)(fd, data, size, flags)); }

/* --- the wall clock --- */

static double offset(void) {
    if (!step) return 0;
    struct timespec now;
    REAL(clock_gettime)(CLOCK_MONOTONIC, &now);
    return now.tv_sec > step_at.tv_sec || (now.tv_sec == step_at.tv_sec && now.tv_nsec >= step_at.tv_nsec) ? step : 0;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int result = REAL(clock_gettime)(clock, at);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += (time_t)offset();
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    int result = REAL(gettimeofday)(at, zone);
    if (!result) at->tv_sec += (time_t)offset();
    return result;
}

time_t time(time_t *at) {
    time_t now = REAL(time)(NULL) + (time_t)offset();
    if (at) *at = now;
    return now;
}
