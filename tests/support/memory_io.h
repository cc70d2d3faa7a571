/* memory_io.h - a dt_io table with files in memory, for tests and fuzzing. Every call can be made
   to fail.

       memory_fs fs = { 0 };
       dt_io     io = memory_io(&fs);
       memory_put(&fs, "a", "text", 4);
       ... dt_ctx_make((dt_ctx_desc){ .io = &io }) ...
       memory_clear(&fs);

   A name that ends in '/' or is "." is a folder, which can be opened and synced. Include this file
   after dt_tensor.h. */
#ifndef MEMORY_IO_H
#define MEMORY_IO_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MEMORY_FILES = 24, MEMORY_FOLDER = 1000 };

typedef struct memory_file {
    char name[160];
    unsigned char *data;
    /* size: of the file; room: bytes of data. Bytes from `room` on read as zeros. */
    size_t size, room;
    int used;
} memory_file;

typedef struct memory_fs {
    memory_file file[MEMORY_FILES];
    int open;            /* descriptors that are open */
    long calls, fail_at; /* fail_at: number of the call that fails, from 1; 0: none */
    int reason;          /* errno of the failing call */
    size_t most;         /* most bytes of one read or write; 0: no limit */
    int interrupt;       /* n: every n-th read or write fails with EINTR; 0: none */
    int moves;           /* number of reads and writes */
    size_t shrunk;       /* not 0: reads find the end of the file after that many bytes */
    int synced;          /* fsyncs since the last write; -1: a rename without an fsync before it */
} memory_fs;

static inline int memory_at(const memory_fs *fs, const char *name) {
    for (int i = 0; i < MEMORY_FILES; i++)
        if (fs->file[i].used && strcmp(fs->file[i].name, name) == 0) return i;
    return -1;
}

static inline void memory_drop(memory_fs *fs, int i) {
    free(fs->file[i].data);
    memset(&fs->file[i], 0, sizeof fs->file[i]);
}

static inline int memory_make(memory_fs *fs, const char *name) {
    int i = 0;
    while (i < MEMORY_FILES && fs->file[i].used) i++;
    if (i == MEMORY_FILES || strlen(name) >= sizeof fs->file[i].name) return -1;
    fs->file[i].used = 1;
    memcpy(fs->file[i].name, name, strlen(name) + 1);
    return i;
}

static inline int memory_size_to(memory_file *f, size_t bytes) {
    if (bytes > f->room) {
        unsigned char *data = (unsigned char *)realloc(f->data, bytes);
        if (!data) return -1;
        memset(data + f->room, 0, bytes - f->room);
        f->data = data;
        f->room = bytes;
    }
    if (bytes < f->size) memset(f->data + bytes, 0, f->size - bytes);
    f->size = bytes;
    return 0;
}

/* Makes a file, or replaces the file of that name. */
static inline void memory_put(memory_fs *fs, const char *name, const void *data, size_t bytes) {
    int i = memory_at(fs, name);
    if (i < 0) i = memory_make(fs, name);
    if (i < 0 || memory_size_to(&fs->file[i], bytes) != 0) abort();
    if (bytes) memcpy(fs->file[i].data, data, bytes);
}

static inline void memory_clear(memory_fs *fs) {
    for (int i = 0; i < MEMORY_FILES; i++) memory_drop(fs, i);
}

static inline int memory_fails(memory_fs *fs) {
    errno = 0;
    if (++fs->calls != fs->fail_at) return 0;
    errno = fs->reason;
    return 1;
}

static inline int memory_open(void *user, const char *path, int mode) {
    memory_fs *fs = (memory_fs *)user;
    size_t n = strlen(path);
    if (memory_fails(fs)) return -1;
    if (n && (path[n - 1] == '/' || strcmp(path, ".") == 0) && mode == DT_IO_READ) {
        fs->open++;
        return MEMORY_FOLDER;
    }
    int i = memory_at(fs, path);
    int makes = mode == DT_IO_CREATE || mode == DT_IO_PRIVATE;
    if (makes && i >= 0) {
        errno = EEXIST;
        return -1;
    }
    if (makes) i = memory_make(fs, path);
    if (i < 0) errno = makes ? ENOSPC : ENOENT;
    fs->open += i >= 0;
    return i;
}

static inline int memory_close(void *user, int fd) {
    memory_fs *fs = (memory_fs *)user;
    (void)fd;
    fs->open--;
    return memory_fails(fs) ? -1 : 0;
}

static inline int64_t memory_size(void *user, int fd) {
    memory_fs *fs = (memory_fs *)user;
    if (memory_fails(fs)) return -1;
    if (fd != MEMORY_FOLDER) return (int64_t)fs->file[fd].size;
    errno = EISDIR;
    return -1;
}

static inline int memory_short(memory_fs *fs, size_t *bytes) {
    fs->moves++;
    if (fs->interrupt && fs->moves % fs->interrupt == 0) {
        errno = EINTR;
        return 1;
    }
    if (fs->most && *bytes > fs->most) *bytes = fs->most;
    return 0;
}

static inline int64_t memory_pread(void *user, int fd, void *buf, size_t bytes, int64_t offset) {
    memory_fs *fs = (memory_fs *)user;
    memory_file *f = &fs->file[fd];
    size_t end = fs->shrunk && fs->shrunk < f->size ? fs->shrunk : f->size;
    if (memory_fails(fs) || memory_short(fs, &bytes)) return -1;
    if (offset < 0 || (uint64_t)offset >= end) return 0;
    size_t n = end - (size_t)offset < bytes ? end - (size_t)offset : bytes;
    for (size_t i = 0; i < n; i++) {
        size_t at = (size_t)offset + i;
        ((unsigned char *)buf)[i] = at < f->room ? f->data[at] : 0;
    }
    return (int64_t)n;
}

static inline int64_t memory_pwrite(
    void *user, int fd, const void *buf, size_t bytes, int64_t offset) {
    memory_fs *fs = (memory_fs *)user;
    memory_file *f = &fs->file[fd];
    if (memory_fails(fs) || memory_short(fs, &bytes)) return -1;
    if ((size_t)offset + bytes > f->size && memory_size_to(f, (size_t)offset + bytes) != 0)
        return -1;
    memcpy(f->data + offset, buf, bytes);
    fs->synced = 0;
    return (int64_t)bytes;
}

static inline int memory_fsync(void *user, int fd) {
    memory_fs *fs = (memory_fs *)user;
    if (memory_fails(fs)) return -1;
    fs->synced += fd != MEMORY_FOLDER;
    return 0;
}

static inline int memory_rename(void *user, const char *from, const char *to) {
    memory_fs *fs = (memory_fs *)user;
    if (memory_fails(fs)) return -1;
    int i = memory_at(fs, from), old = memory_at(fs, to);
    if (i < 0) {
        errno = ENOENT;
        return -1;
    }
    if (old >= 0) memory_drop(fs, old);
    memcpy(fs->file[i].name, to, strlen(to) + 1);
    if (fs->synced == 0) fs->synced = -1;
    return 0;
}

static inline int memory_resize(void *user, int fd, int64_t bytes) {
    memory_fs *fs = (memory_fs *)user;
    if (memory_fails(fs)) return -1;
    return memory_size_to(&fs->file[fd], (size_t)bytes);
}

static inline int memory_remove(void *user, const char *path) {
    memory_fs *fs = (memory_fs *)user;
    int i = memory_at(fs, path);
    if (memory_fails(fs)) return -1;
    if (i >= 0)
        memory_drop(fs, i);
    else
        errno = ENOENT;
    return i >= 0 ? 0 : -1;
}

static inline dt_io memory_io(memory_fs *fs) {
    dt_io io = { fs, memory_open, memory_close, memory_size, memory_pread, memory_pwrite,
        memory_fsync, memory_rename, memory_resize, memory_remove, NULL, NULL, NULL, NULL, NULL };
    return io;
}

#endif
