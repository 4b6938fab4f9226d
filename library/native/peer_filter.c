/* Refuses TCP connections of processes that do not belong to the job. LD_PRELOAD loads it into all processes of a job.

   Listening sockets of torch, gloo, Open MPI, NCCL and gRPC ask for no password: anybody who reaches one takes part.
   This file replaces accept(): a connection is handed to the program only if its other end is
   - a process of this user (or root) on this machine, as /proc/net/tcp lists it, or
   - an address to which one of the names in SHOAL_PEERS resolves now: the other hosts of the job.
   From any other, the program reads the end of the stream at once, as if the stranger had connected and left.

   The kernel does not tell the user of a socket after its process has closed it. NCCL's ranks connect, send who they are
   and close before the first rank accepts. So connect() notes each connection to this machine in a table. `train` shares
   it with the processes of the job (SHOAL_CONNECTIONS, a path that strangers cannot open). A note is the kernel's number
   of the socket that will be accepted. No later socket gets this number: a note that nobody removes does no harm.

   connect() to MASTER_PORT on this machine is refused if another user listens there, who was faster than the first
   rank. The listeners are looked at before and after the connection is made, so that nobody listens in between.

   Data of accepted connections do not pass through this file. Reasons: docs/decisions/only-members.md. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define STATE_ESTABLISHED 0x01
#define STATE_LISTEN 0x0A
#define PORTS 65536
#define REFUSED 16 /* addresses that are remembered */
#define ESTABLISHING_MS 200 /* a connection on one machine is made at once, unless the listener has too many waiting */

typedef struct {
    struct in6_addr address; /* IPv4 as ::ffff:a.b.c.d */
    unsigned port;
} endpoint_t;

/* A line of /proc/net/tcp or tcp6. */
typedef struct {
    endpoint_t local, remote;
    unsigned state, uid;
    unsigned long inode; /* 0: no process has the socket any more, and the uid means nothing */
    uint64_t cookie;     /* as SO_COOKIE; 0: not known */
} row_t;

static struct in6_addr map_ipv4(uint32_t address) {
    struct in6_addr mapped = {.s6_addr = {[10] = 0xff, [11] = 0xff}};
    memcpy(&mapped.s6_addr[12], &address, sizeof address);
    return mapped;
}

/* Returns false for other families, such as Unix sockets. */
static bool read_endpoint(const struct sockaddr *from, endpoint_t *to) {
    if (from->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const void *)from;
        *to = (endpoint_t){map_ipv4(in->sin_addr.s_addr), ntohs(in->sin_port)};
        return true;
    }
    if (from->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in = (const void *)from;
        *to = (endpoint_t){in->sin6_addr, ntohs(in->sin6_port)};
        return true;
    }
    return false;
}

static bool is_same_address(const struct in6_addr *one, const struct in6_addr *other) {
    return memcmp(one, other, sizeof *one) == 0;
}

static bool is_same(const endpoint_t *one, const endpoint_t *other) {
    return one->port == other->port && is_same_address(&one->address, &other->address);
}

static bool is_any(const struct in6_addr *address) {
    static const struct in6_addr any = IN6ADDR_ANY_INIT;
    struct in6_addr any4 = map_ipv4(0);
    return is_same_address(address, &any) || is_same_address(address, &any4);
}

static bool is_loopback(const struct in6_addr *address) {
    return IN6_IS_ADDR_LOOPBACK(address) || (IN6_IS_ADDR_V4MAPPED(address) && address->s6_addr[12] == 127);
}

/* The kernel prints each 32-bit word of an address in the order of this machine's bytes. */
static bool parse_address(const char *text, struct in6_addr *address) {
    unsigned words[4];
    if (strlen(text) == 8 && sscanf(text, "%8x", &words[0]) == 1) {
        *address = map_ipv4(words[0]);
        return true;
    }
    if (sscanf(text, "%8x%8x%8x%8x", &words[0], &words[1], &words[2], &words[3]) != 4) return false;
    memcpy(address, words, sizeof *address);
    return true;
}

static bool parse_row(const char *line, row_t *row) {
    char local[33], remote[33];
    return sscanf(line, " %*d: %32[0-9A-F]:%x %32[0-9A-F]:%x %x %*x:%*x %*x:%*x %*x %u %*d %lu", local,
                  &row->local.port, remote, &row->remote.port, &row->state, &row->uid, &row->inode) == 7 &&
           parse_address(local, &row->local.address) && parse_address(remote, &row->remote.address);
}

static bool is_row_between(const row_t *row, const endpoint_t *local, const endpoint_t *remote) {
    return row->state != STATE_LISTEN && is_same(&row->local, local) && is_same(&row->remote, remote);
}

static bool is_trusted_owner(const row_t *row) {
    return row->inode != 0 && (row->uid == geteuid() || row->uid == 0);
}

static bool is_listener(const row_t *row, const endpoint_t *local) {
    return row->state == STATE_LISTEN && row->local.port == local->port &&
           (is_any(&row->local.address) || is_same_address(&row->local.address, &local->address));
}

static bool is_trusted_listener(const row_t *row, const endpoint_t *local, const endpoint_t *unused) {
    (void)unused;
    return is_listener(row, local) && is_trusted_owner(row);
}

/* Somebody else can listen at ::1 next to a first rank at 0.0.0.0: all listeners count. */
static bool is_foreign_listener(const row_t *row, const endpoint_t *local, const endpoint_t *unused) {
    (void)unused;
    return is_listener(row, local) && !is_trusted_owner(row);
}

/* Finds the first socket of this machine (of this network namespace) for which `matches` is true. */
static bool find_row(bool (*matches)(const row_t *, const endpoint_t *, const endpoint_t *), const endpoint_t *local,
                     const endpoint_t *remote, row_t *row) {
    static const char *const tables[] = {"/proc/self/net/tcp", "/proc/self/net/tcp6"};
    bool found = false;
    for (size_t table = 0; table < 2 && !found; table++) {
        FILE *file = fopen(tables[table], "re");
        char line[512];
        while (file && !found && fgets(line, sizeof line, file))
            found = parse_row(line, row) && matches(row, local, remote);
        if (file) fclose(file);
    }
    return found;
}

static void write_diag_address(const struct in6_addr *from, __be32 to[4]) {
    size_t skipped = IN6_IS_ADDR_V4MAPPED(from) ? 12 : 0;
    memcpy(to, from->s6_addr + skipped, sizeof *from - skipped);
}

/* Asks the kernel for one socket. It knows it by its hash: others' sockets, however many, make no difference. */
static bool ask_kernel(const endpoint_t *local, const endpoint_t *remote, row_t *row) {
    struct {
        struct nlmsghdr header;
        struct inet_diag_req_v2 socket;
    } question = {{.nlmsg_len = sizeof question, .nlmsg_type = SOCK_DIAG_BY_FAMILY, .nlmsg_flags = NLM_F_REQUEST},
                  {.sdiag_protocol = IPPROTO_TCP, .idiag_states = ~0u}};
    union {
        struct nlmsghdr header;
        char bytes[4096];
    } answer;
    struct inet_diag_sockid *id = &question.socket.id;
    bool is_ipv4 = IN6_IS_ADDR_V4MAPPED(&local->address) && IN6_IS_ADDR_V4MAPPED(&remote->address);
    question.socket.sdiag_family = is_ipv4 ? AF_INET : AF_INET6;
    id->idiag_sport = htons((uint16_t)local->port);
    id->idiag_dport = htons((uint16_t)remote->port);
    write_diag_address(&local->address, id->idiag_src);
    write_diag_address(&remote->address, id->idiag_dst);
    id->idiag_cookie[0] = id->idiag_cookie[1] = INET_DIAG_NOCOOKIE;

    int kernel = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
    if (kernel < 0) return false;
    ssize_t size = send(kernel, &question, sizeof question, 0) < 0 ? -1 : recv(kernel, &answer, sizeof answer, 0);
    close(kernel);
    const struct inet_diag_msg *found = NLMSG_DATA(&answer.header);
    if (size < (ssize_t)NLMSG_LENGTH(sizeof *found) || answer.header.nlmsg_type != SOCK_DIAG_BY_FAMILY ||
        found->idiag_state == STATE_LISTEN || found->id.idiag_dport != id->idiag_dport)
        return false; /* it has no such socket, or only one that listens */
    uint64_t cookie = (uint64_t)found->id.idiag_cookie[1] << 32 | found->id.idiag_cookie[0];
    *row = (row_t){*local, *remote, found->idiag_state, found->idiag_uid, found->idiag_inode, cookie};
    return true;
}

/* Finds the socket of this machine that is connected from `local` to `remote`.

   `remote` is the end of a connected socket of this process. A kernel that does not even know that one cannot answer,
   and its table is read. */
static bool find_connected(const endpoint_t *local, const endpoint_t *remote, row_t *row) {
    row_t other;
    if (ask_kernel(local, remote, row)) return true;
    return !ask_kernel(remote, local, &other) && find_row(is_row_between, local, remote, row);
}

/* Opens the table: for each port, the other end of the connection that a process of the job made from it last. */
static _Atomic uint64_t *open_table(void) {
    static _Atomic(void *) opened; /* of several threads, one may map it once more */
    void *table = atomic_load(&opened);
    const char *path = getenv("SHOAL_CONNECTIONS");
    struct stat found;
    if (table || !path) return table;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return NULL;
    size_t size = PORTS * sizeof(uint64_t);
    if (fstat(file, &found) == 0 && (size_t)found.st_size == size)
        table = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (table == MAP_FAILED) return NULL;
    atomic_store(&opened, table);
    return table;
}

static uint64_t read_cookie(int connection) {
    uint64_t cookie = 0;
    socklen_t size = sizeof cookie;
    return getsockopt(connection, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

/* Whether a process of the job made the connection that was accepted. */
static bool is_noted(int accepted, const endpoint_t *from) {
    _Atomic uint64_t *table = open_table();
    uint64_t cookie = read_cookie(accepted);
    return table && cookie != 0 && atomic_load(&table[from->port % PORTS]) == cookie;
}

static bool is_established(int connection, const endpoint_t *own, const endpoint_t *target) {
    row_t row;
    return ask_kernel(own, target, &row) && row.state == STATE_ESTABLISHED && row.cookie == read_cookie(connection);
}

/* Notes a connection that this process has made to this machine. Before it is established, and after it has ended, the
   other end may belong to a stranger who has the port. */
static void note(int connection, const endpoint_t *target) {
    struct sockaddr_storage ours = {0};
    socklen_t size = sizeof ours;
    endpoint_t own;
    row_t row;
    _Atomic uint64_t *table = open_table();
    if (!table || getsockname(connection, (struct sockaddr *)&ours, &size) != 0 ||
        !read_endpoint((struct sockaddr *)&ours, &own) ||
        !(is_loopback(&target->address) || is_same_address(&own.address, &target->address)))
        return;
    poll(&(struct pollfd){.fd = connection, .events = POLLOUT}, 1, ESTABLISHING_MS);
    if (is_established(connection, &own, target) && ask_kernel(target, &own, &row) &&
        is_established(connection, &own, target))
        atomic_store(&table[own.port % PORTS], row.cookie);
}

static bool resolves_to(const char *name, const endpoint_t *peer) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    if (getaddrinfo(name, NULL, &hints, &found) != 0) return false;
    bool same = false;
    for (struct addrinfo *each = found; each && !same; each = each->ai_next) {
        endpoint_t one;
        same = read_endpoint(each->ai_addr, &one) && is_same_address(&one.address, &peer->address);
    }
    freeaddrinfo(found);
    return same;
}

static double read_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* While a host of the job is missing, the lookup of its name can take ten seconds. A stranger who connects often would
   keep the members waiting. So an address that is refused is not looked up again for ten times as long. */
static bool is_other_host(const endpoint_t *peer) {
    static _Thread_local struct {
        struct in6_addr address;
        double until;
    } refused[REFUSED];
    static _Thread_local unsigned count;
    double began = read_clock();
    for (size_t index = 0; index < REFUSED; index++)
        if (began < refused[index].until && is_same_address(&refused[index].address, &peer->address)) return false;
    const char *peers = getenv("SHOAL_PEERS");
    char *names = strdup(peers ? peers : ""), *rest = names;
    bool found = false;
    for (char *name; names && !found && (name = strtok_r(rest, " ", &rest));) found = resolves_to(name, peer);
    free(names);
    double ended = read_clock();
    if (!found) {
        refused[count % REFUSED].address = peer->address;
        refused[count++ % REFUSED].until = ended + 10 * (ended - began);
    }
    return found;
}

static bool is_member(int accepted, const endpoint_t *peer, const endpoint_t *own) {
    row_t row;
    bool here = find_connected(peer, own, &row);
    if (here && row.inode != 0) return is_trusted_owner(&row);
    if (here || is_loopback(&peer->address) || is_same_address(&peer->address, &own->address))
        return is_noted(accepted, peer); /* it has left */
    return is_other_host(peer);
}

/* Says it once in each process: a stranger must not fill the log. */
static void report(const char *what, const endpoint_t *peer) {
    static atomic_flag reported = ATOMIC_FLAG_INIT;
    char text[INET6_ADDRSTRLEN] = "?";
    if (atomic_flag_test_and_set(&reported)) return;
    if (IN6_IS_ADDR_V4MAPPED(&peer->address)) inet_ntop(AF_INET, &peer->address.s6_addr[12], text, sizeof text);
    else inet_ntop(AF_INET6, &peer->address, text, sizeof text);
    dprintf(STDERR_FILENO,
            "train: process %d refused a connection %s %s, port %u: not a process of this job. Fix: if it should take "
            "part, set SHOAL_MEMBERS_ONLY=0. Later ones are refused without a message.\n",
            (int)getpid(), what, text, peer->port);
}

/* The program reads the end of the stream, and nothing that a stranger has sent. */
static void discard(int connection) {
    char scratch[4096];
    shutdown(connection, SHUT_RDWR);
    while (recv(connection, scratch, sizeof scratch, MSG_DONTWAIT) > 0) {}
}

static int admit(int connection) {
    struct sockaddr_storage theirs = {0}, ours = {0};
    socklen_t theirs_size = sizeof theirs, ours_size = sizeof ours;
    endpoint_t peer, own;
    if (connection < 0) return connection;
    int before = errno;
    if (getsockname(connection, (struct sockaddr *)&ours, &ours_size) != 0 ||
        !read_endpoint((struct sockaddr *)&ours, &own))
        return connection; /* not TCP */
    if (getpeername(connection, (struct sockaddr *)&theirs, &theirs_size) != 0) {
        discard(connection); /* it has reset the connection, but bytes that it sent can still be read */
    } else if (read_endpoint((struct sockaddr *)&theirs, &peer) && !is_member(connection, &peer, &own)) {
        discard(connection);
        report("from", &peer);
    }
    errno = before;
    return connection;
}

static void *find_next(const char *name) {
    void *function = dlsym(RTLD_NEXT, name);
    if (!function) abort();
    return function;
}

int accept(int listener, struct sockaddr *restrict address, socklen_t *restrict size) {
    int (*next)(int, struct sockaddr *, socklen_t *) = find_next("accept");
    return admit(next(listener, address, size));
}

int accept4(int listener, struct sockaddr *restrict address, socklen_t *restrict size, int flags) {
    int (*next)(int, struct sockaddr *, socklen_t *, int) = find_next("accept4");
    return admit(next(listener, address, size, flags));
}

static bool is_rendezvous(const endpoint_t *target) {
    const char *port = getenv("MASTER_PORT");
    return port && target->port == (unsigned)strtoul(port, NULL, 10) && is_loopback(&target->address);
}

/* Whether the first rank has accepted a connection, or it and nobody else listens there. */
static bool leads_to_member(int connection, const endpoint_t *target) {
    struct sockaddr_storage ours = {0};
    socklen_t size = sizeof ours;
    endpoint_t own;
    row_t row;
    if (getsockname(connection, (struct sockaddr *)&ours, &size) != 0 ||
        !read_endpoint((struct sockaddr *)&ours, &own))
        return false;
    if (find_connected(target, &own, &row) && row.inode != 0) return is_trusted_owner(&row); /* accepted already */
    return find_row(is_trusted_listener, target, NULL, &row) && !find_row(is_foreign_listener, target, NULL, &row);
}

static int connect_to_members(int connection, const struct sockaddr *address, socklen_t size) {
    int (*next)(int, const struct sockaddr *, socklen_t) = find_next("connect");
    endpoint_t target;
    row_t row;
    if (!read_endpoint(address, &target) || !is_rendezvous(&target)) return next(connection, address, size);
    if (!find_row(is_foreign_listener, &target, NULL, &row)) {
        int result = next(connection, address, size), before = errno;
        if ((result != 0 && before != EINPROGRESS) || leads_to_member(connection, &target)) {
            errno = before;
            return result;
        }
        discard(connection);
    }
    if (find_row(is_foreign_listener, &target, NULL, &row)) report("to", &target); /* otherwise nobody listens yet */
    errno = ECONNREFUSED;
    return -1;
}

int connect(int connection, const struct sockaddr *address, socklen_t size) {
    int (*next)(int, const struct sockaddr *, socklen_t) = find_next("connect");
    endpoint_t target;
    if (!address || size < sizeof(struct sockaddr_in) || !read_endpoint(address, &target))
        return next(connection, address, size);
    int result = connect_to_members(connection, address, size), before = errno;
    if (result == 0 || before == EINPROGRESS) note(connection, &target);
    errno = before;
    return result;
}
