/* A program with more memory than it uses: what it does not use is to go out, and must come back as it was.
 *
 *     idle MIB MIB_LEFT [fork]
 *
 * Fills so many MiB, uses a tenth of them all the time until MIB_LEFT are resident, and then compares everything. With
 * `fork` it has a child first, which ends at once: to the kernel the pages still count as shared until they are
 * written to.
 */
#include "behaviour.h"

#define SECONDS_MAX 200

int main(int argc, char **argv) {
    CHECK(argc == 3 || argc == 4);
    size_t bytes = strtoul(argv[1], NULL, 10) * MIB, most = strtoul(argv[2], NULL, 10);
    char *data = map_anonymous(bytes);
    fill(data, bytes, 1);
    if (argc == 4) {
        pid_t child = fork();
        if (child == 0) _exit(0);
        child_is_well(child, "a child that ends at once");
    }
    double until = now() + SECONDS_MAX;
    uint64_t random = 2;
    while (status_mib("RssAnon:") > most) {
        CHECK(now() < until, "still %zu MiB", status_mib("RssAnon:"));
        for (int i = 0; i < 1000; i++) {
            size_t page = next_random(&random) % (bytes / PAGE / 10);
            CHECK(page_is(data + page * PAGE, 1 + page), "page %zu in use", page);
        }
        /* Half of the time, so that whoever reclaims has a CPU too. */
        usleep(1000);
    }
    size_t left = status_mib("RssAnon:");
    verify(data, bytes, 1, "after it was idle");
    char text[128];
    report(text, snprintf(text, sizeof text, "%zu MiB were left, and the contents are as they must be\n", left));
    return 0;
}
