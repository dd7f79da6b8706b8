# zfolio. `make demo` and `make test` work on a fresh Debian 12 with git, make and root.

CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
TARGET := $(or $(CARGO_TARGET_DIR),target)
BIN := $(TARGET)/release
# A package apart from the workspace.
EXAMPLE = examples/backend/Cargo.toml
FUZZ_SECONDS ?= 60
SECONDS ?= 60
# An hour, unless somebody says otherwise.
SOAK_SECONDS = $(if $(filter file,$(origin SECONDS)),3600,$(SECONDS))
HOST = $(shell rustc -vV | sed -n 's/^host: //p')

# The address sanitizer, with the runtime of the C compiler. Every Rust compiler works, including Debian's
# (RUSTC_BOOTSTRAP makes it accept -Z). The C codecs are built with it too, since their build scripts see the
# flags. With an explicit target the build scripts themselves are built without it. gcc turns some local arrays
# into constants, and then reports a use after their scope (in zstd): that one check is off in C.
ASAN = -Zsanitizer=address -Zexternal-clangrt -Zpre-link-args=-Wl,--no-as-needed,-lasan,--as-needed \
	-Cdebug-assertions
ASAN_CARGO = RUSTC_BOOTSTRAP=1 CFLAGS=-fno-sanitize-address-use-after-scope \
	RUSTFLAGS='$(ASAN) $(1)' CARGO_TARGET_DIR='$(abspath $(TARGET))/$(2)' $(CARGO)

# Coverage, by which a fuzzer sees which code an input has reached.
COVERAGE = --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1

.PHONY: help setup setup-build setup-guest build demo test test-guest lint loom iaa-faults simulate replay mutants \
	soak asan bench bench-all bench-pressure fuzz install uninstall deb clean

help:
	@echo 'make build     the zfolio command and the library that it loads, in $(BIN)'
	@echo 'make demo      a Python program that needs 1 GiB: killed in 256 MiB, and finished there'
	@echo 'make test      all tests (as root: all of them)'
	@echo 'make test-guest  disks in virtual machines: file systems, swap, systemd (installs QEMU, fetches kernels)'
	@echo 'make lint      formatting, clippy, rustdoc'
	@echo 'make loom      the lock-free steps, in every order'
	@echo 'make iaa-faults  the driver of the accelerator on its model, 10^8 descriptors with faults'
	@echo 'make simulate  the pager on a simulated kernel, and disks, for SECONDS=$(SECONDS), or one run again: SEED=n'
	@echo 'make replay    what is kept in memory, by accesses of real programs that are recorded first (5 minutes)'
	@echo 'make mutants   planted defects, each of which the tests must find'
	@echo 'make soak      real programs that spill while things go wrong, for SECONDS=$(SOAK_SECONDS) (root), or one'
	@echo '               round again: SEED=n'
	@echo 'make asan      the tests of core under the address sanitizer, C codecs included'
	@echo 'make bench     usemem, real programs and every codec beside the kernel'\''s own zram (root, half an hour)'
	@echo 'make bench-all the same, and swap, spill, zswap, zram, replacement, accelerators (root, hours)'
	@echo 'make bench-pressure  each figure that is wanted for programs with less memory than they need, beside what is'
	@echo '               measured (root, 40 minutes); ROWS="sort node": only these'
	@echo 'make fuzz      each fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS)'
	@echo 'make setup     install what build and tests need (Debian); setup-build: the build only'
	@echo 'make install   to PREFIX=$(PREFIX); make uninstall removes what it put there'
	@echo 'make deb       a Debian package, in $(TARGET)/debian'
	@echo 'make clean     remove $(TARGET)'

setup:
	scripts/setup full '$(TARGET)/tools'

setup-build:
	scripts/setup build

build: setup-build
	$(CARGO) build --workspace --release --locked

demo: build
	@scripts/demo

# All stages run, even if one fails; the last lines say what failed, and what was skipped and why.
test: setup
	@CARGO='$(CARGO)' scripts/test

# Boots guests without KVM, some minutes. What it installs and fetches it says; the kernel is unpacked in
# $(TARGET)/guest.
setup-guest:
	scripts/setup guest '$(TARGET)/guest'

test-guest: build setup-guest
	ZFOLIO='$(abspath $(BIN)/zfolio)' scripts/guest-device

# By the profile of the tests, which then find the C libraries built.
lint:
	@if $(CARGO) fmt --version >/dev/null 2>&1; then set -x; $(CARGO) fmt --all --check && \
		$(CARGO) fmt --manifest-path $(EXAMPLE) --check; \
	else echo 'SKIPPED: rustfmt is not installed (make setup)'; fi
	@if $(CARGO) clippy --version >/dev/null 2>&1; then set -x; \
		$(CARGO) clippy --profile checked --workspace --all-targets --locked -- -D warnings && \
		CARGO_TARGET_DIR='$(TARGET)' $(CARGO) clippy --profile checked --manifest-path $(EXAMPLE) --locked -- -D warnings; \
	else echo 'SKIPPED: clippy is not installed (make setup)'; fi
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --profile checked --workspace --no-deps --locked

# Tries every order of the steps of two threads.
loom:
	$(CARGO) test --profile checked --locked -p zfolio-core --features loom --lib loom_
	$(CARGO) test --profile checked --locked -p zfolio-iaa --features loom --lib loom_
	$(CARGO) test --profile checked --locked -p zfolio-workers --features loom --lib loom_

# The accelerator's driver on its model: 10^8 descriptors, three quarters of an hour.
iaa-faults:
	$(if $(SEED),SEED=$(SEED)) $(CARGO) test --profile checked --locked -p zfolio-iaa --test faults -- \
		--ignored --nocapture

# Each run follows from its seed. A failure names the seed; TRACE=1 shows every step of one.
simulate:
	ZFOLIO_SIMULATE_SECONDS=$(SECONDS) $(if $(SEED),ZFOLIO_SIMULATE_SEED=$(SEED)) $(if $(TRACE),ZFOLIO_SIMULATE_TRACE=1) \
		$(if $(ONLY),ZFOLIO_SIMULATE_ONLY=$(ONLY)) $(CARGO) test --profile checked --locked -p zfolio-pager --lib -- \
		--exact sim::tests::simulated_programs_find_their_bytes --nocapture

# The recordings stay, and are used again.
replay: build
	ZFOLIO='$(abspath $(BIN)/zfolio)' CARGO='$(CARGO)' scripts/replay '$(TARGET)/recordings'

# In a copy of the tree, one defect at a time.
mutants:
	CARGO='$(CARGO)' scripts/mutants

# Real programs with spill and injected faults. A failure names its seed.
soak: build
	ZFOLIO='$(abspath $(BIN)/zfolio)' tests/soak/run $(if $(SEED),--seed $(SEED) --rounds 1,--seconds $(SOAK_SECONDS))

asan:
	@echo 'int main() {}' | $(or $(CC),cc) -x c -fsanitize=address - -o /dev/null 2>/dev/null || \
		{ echo 'asan: the C compiler has no address sanitizer (Debian: libgcc-12-dev, with gcc)'; exit 1; }
	$(call ASAN_CARGO,,asan) test --release --locked --target $(HOST) -p zfolio-core --lib --tests

bench: build
	$(BIN)/zfolio bench usemem --against kernel
	$(BIN)/zfolio bench programs --against kernel
	$(BIN)/zfolio bench codecs --against kernel

# The tiers below the pool, the disks and the accelerator, and `auto`. Each is run if the one before fails, too.
bench-all: bench
	@failed=; for what in 'auto' 'swap' 'spill --against kernel -r 3' \
		'usemem --against kernel --zswap /var/tmp --bytes 1536M --limit 256M --setting auto --without inline' \
		'zram --against kernel' 'zram --against one-stream' 'zram --against codec' 'recompress' \
		'replacement --generated' 'iaa'; do \
		echo "== zfolio bench $$what"; $(BIN)/zfolio bench $$what || failed="$$failed; $$what"; \
	done; \
	for what in '' '--connections 1,2,4' '--jobs 1,2,4,10' --resident; do \
		echo "== scripts/bench-device $$what"; \
		scripts/bench-device --zfolio $(BIN)/zfolio $$what || failed="$$failed; bench-device $$what"; \
	done; [ -z "$$failed" ] || { echo "bench-all: failed$$failed"; exit 1; }

# More languages are measured if they are installed: ruby guile-3.0 golang-go luajit php-cli mono-mcs mono-runtime
# ocaml-nox (Debian's packages). What is missing gets a line.
bench-pressure: build
	ZFOLIO='$(abspath $(BIN)/zfolio)' scripts/pressure $(ROWS)

fuzz:
	@echo 'int main() {}' | $(or $(CXX),c++) -x c++ -fsanitize=address - -o /dev/null 2>/dev/null || \
		{ echo 'fuzz: a C++ compiler with the address sanitizer is missing (Debian: g++)'; exit 1; }
	cd fuzz && $(call ASAN_CARGO,$(COVERAGE),fuzz) build --release --target $(HOST)
	@echo '== canary: a planted bug, which must be found'; mkdir -p fuzz/artifacts/canary; \
	if '$(TARGET)'/fuzz/$(HOST)/release/canary -artifact_prefix=fuzz/artifacts/canary/ -max_total_time=60 \
		>'$(TARGET)'/fuzz/canary.log 2>&1; then \
		echo 'fuzz: the planted bug was not found in 60 seconds: what is below would prove nothing'; exit 1; \
	fi; grep -E 'panicked|range' '$(TARGET)'/fuzz/canary.log | head -n 2
	@set -e; for target in $(filter-out canary,$(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))); do \
		echo "== $$target, $(FUZZ_SECONDS) seconds"; \
		mkdir -p fuzz/corpus/$$target fuzz/artifacts/$$target; \
		'$(TARGET)'/fuzz/$(HOST)/release/$$target fuzz/corpus/$$target \
			-artifact_prefix=fuzz/artifacts/$$target/ -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1; \
	done

# What was built is installed: root may have another compiler, or none.
# Stripped programs, manual pages, documents, completions, the udev rule; debugging information in PREFIX/lib/debug.
install:
	packaging/install install '$(BIN)' '$(DESTDIR)' '$(PREFIX)'

uninstall:
	packaging/install uninstall '$(DESTDIR)' '$(PREFIX)'

# A Debian package, and one with debugging information, in $(TARGET)/debian.
deb:
	packaging/deb '$(BIN)' '$(TARGET)/debian'

clean:
	$(CARGO) clean
