/*
 * Shifts the wall clock of one process, for tests: a library for LD_PRELOAD.
 *
 * HEADRACE_TEST_CLOCK_FILE names a file with a 64-bit integer of this machine: the nanoseconds to add. The file is
 * mapped, so a test can set the clock of a process that runs. Monotonic clocks are not shifted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000LL

static const volatile int64_t no_shift = 0;
static const volatile int64_t *shift_ns = &no_shift;

static int (*real_clock_gettime)(clockid_t, struct timespec *);
static long (*real_syscall)(long, ...);

static void add_ns(struct timespec *at, int64_t ns)
{
    int64_t sum = at->tv_sec * NS_PER_S + at->tv_nsec + ns;
    if (sum < 0)
        sum = 0;
    at->tv_sec = sum / NS_PER_S;
    at->tv_nsec = sum % NS_PER_S;
}

__attribute__((constructor)) static void start(void)
{
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_syscall = dlsym(RTLD_NEXT, "syscall");
    const char *path = getenv("HEADRACE_TEST_CLOCK_FILE");
    if (path == NULL)
        return;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        _exit(121);
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED)
        _exit(122);
    close(file);
    shift_ns = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    /* Other libraries' constructors may run before ours. */
    if (real_clock_gettime == NULL)
        real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_clock_gettime(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        add_ns(now, *shift_ns);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec at;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &at))
        return -1;
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now != NULL)
        *now = at.tv_sec;
    return at.tv_sec;
}

/* The kernel does not know of the shift: waits of absl until a time of the wall clock need it taken out again. */
long syscall(long number, ...)
{
    va_list list;
    long given[6];
    struct timespec until;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        given[i] = va_arg(list, long);
    va_end(list);
    if (real_syscall == NULL)
        real_syscall = dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_futex && (given[1] & FUTEX_CLOCK_REALTIME) && given[3] != 0) {
        until = *(const struct timespec *)given[3];
        add_ns(&until, -*shift_ns);
        given[3] = (long)&until;
    }
    return real_syscall(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
