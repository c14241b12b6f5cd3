/* What the disk gives to the very calls that a store of ours makes, without Python: one value after another, by threads.

   disk_calls FOLDER BYTES COUNT THREADS direct|buffered none|ordered|durable [again]

   Each value: look for the name, create under a temporary one, allocate, write, look at the length, fdatasync (not for
   none), link to its name in one of 256 folders, unlink, and for durable fsync that folder. With "again" the temporary
   files exist and were written before, as those of deleted values would. Prints bytes per second. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *folder;
static size_t nbytes;
static int count, direct, synced, durable, again, next_value;
static char *memory;
static pthread_barrier_t together;

static void must(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static void write_whole(int file, const char *from) {
    for (size_t done = 0; done < nbytes;) {
        ssize_t moved = pwrite(file, from + done, nbytes - done, (off_t)done);
        must(moved > 0, "pwrite");
        done += (size_t)moved;
    }
}

static int create(int number, char *path) {
    sprintf(path, "%.4000s/tmp/%d", folder, number);
    return open(path, (again ? 0 : O_CREAT | O_EXCL) | O_RDWR | (direct ? O_DIRECT : 0), 0600);
}

static void store(int number) {
    char temporary[4200], name[4400], shard[4200];
    struct stat found;
    sprintf(shard, "%.4000s/%02x", folder, (unsigned)number * 2654435761u >> 24);
    sprintf(name, "%s/%064d.%064d.0", shard, 0, number);
    lstat(name, &found);
    int file = create(number, temporary);
    must(file >= 0, "open");
    must(again || fallocate(file, 0, 0, (off_t)nbytes) == 0, "fallocate");
    write_whole(file, memory + (size_t)number * nbytes);
    must(fstat(file, &found) == 0 && (size_t)found.st_size == nbytes, "fstat");
    must(!synced || fdatasync(file) == 0, "fdatasync");
    must(close(file) == 0, "close");
    must(link(temporary, name) == 0, "link");
    must(unlink(temporary) == 0, "unlink");
    if (durable) {
        int entries = open(shard, O_RDONLY);
        must(entries >= 0 && fsync(entries) == 0 && close(entries) == 0, "fsync");
    }
}

static void *work(void *unused) {
    pthread_barrier_wait(&together);  /* everybody is here */
    pthread_barrier_wait(&together);  /* and the clock runs */
    for (int number; (number = __atomic_fetch_add(&next_value, 1, __ATOMIC_RELAXED)) < count;) store(number);
    pthread_barrier_wait(&together);
    return unused;
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

int main(int words, char **word) {
    must(words >= 7, "usage: disk_calls FOLDER BYTES COUNT THREADS direct|buffered none|ordered|durable [again]");
    folder = word[1], nbytes = strtoul(word[2], NULL, 10), count = atoi(word[3]);
    int threads = atoi(word[4]);
    direct = !strcmp(word[5], "direct"), durable = !strcmp(word[6], "durable");
    synced = durable || !strcmp(word[6], "ordered"), again = words > 7;
    memory = mmap(NULL, nbytes * (size_t)count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(memory != MAP_FAILED, "mmap");
    for (size_t at = 0; at < nbytes * (size_t)count / 8; at++) ((size_t *)memory)[at] = at * 0x9E3779B97F4A7C15u;
    char path[4200];
    sprintf(path, "%s/tmp", folder);
    mkdir(path, 0700);
    for (int number = 0; number < 256; number++) {
        sprintf(path, "%s/%02x", folder, number);
        mkdir(path, 0700);
    }
    for (int number = 0; again && number < count; number++) {
        again = 0;
        int file = create(number, path);
        must(file >= 0, "open");
        write_whole(file, memory);
        close(file);
        again = 1;
    }
    sync();
    pthread_t thread;
    pthread_barrier_init(&together, NULL, (unsigned)threads + 1);
    for (int number = 0; number < threads; number++)
        must(pthread_create(&thread, NULL, work, NULL) == 0, "pthread_create");
    pthread_barrier_wait(&together);
    double begun = now();
    pthread_barrier_wait(&together);
    pthread_barrier_wait(&together);
    printf("%.0f\n", (double)nbytes * count / (now() - begun));
    return 0;
}
