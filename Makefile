# zfolio. `make demo` and `make test` work on a fresh Debian 12 with git, make and root.

CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
TARGET := $(or $(CARGO_TARGET_DIR),target)
BIN := $(TARGET)/release
FUZZ_SECONDS ?= 60

.PHONY: help setup setup-build build demo test lint loom bench fuzz install clean

help:
	@echo 'make build     the zfolio command and the library that it loads, in $(BIN)'
	@echo 'make demo      a Python program that needs 1 GiB, run in 256 MiB'
	@echo 'make test      all tests (as root: all of them)'
	@echo 'make lint      formatting, clippy, rustdoc'
	@echo 'make loom      the lock-free steps, in every order'
	@echo 'make bench     usemem beside the kernel'\''s own zram swap (root, some minutes)'
	@echo 'make fuzz      each fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS)'
	@echo 'make setup     install what build and tests need (Debian); setup-build: the build only'
	@echo 'make install   to PREFIX=$(PREFIX)'
	@echo 'make clean     remove $(TARGET)'

setup:
	scripts/setup full

setup-build:
	scripts/setup build

build: setup-build
	$(CARGO) build --workspace --release --locked

demo: build
	$(BIN)/zfolio run --limit 256M -- python3 examples/demo.py

# The scripts drive real programs; each says loudly what it skips, and why.
test: setup build
	$(CARGO) test --workspace --release --locked
	$(CARGO) run --quiet --release --locked -p zfolio --example larger_than_limit
	@$(MAKE) --no-print-directory loom
	@set -e; for group in tests/*.sh; do \
		[ -e "$$group" ] || continue; \
		echo "== $$group"; \
		ZFOLIO='$(abspath $(BIN))/zfolio' bash "$$group"; \
	done
	ZFOLIO='$(abspath $(BIN))/zfolio' tests/programs/run
	ZFOLIO='$(abspath $(BIN))/zfolio' tests/behaviour/run

lint:
	@if $(CARGO) fmt --version >/dev/null 2>&1; then set -x; $(CARGO) fmt --all --check; \
	else echo 'SKIPPED: rustfmt is not installed (make setup)'; fi
	@if $(CARGO) clippy --version >/dev/null 2>&1; then set -x; \
		$(CARGO) clippy --workspace --all-targets --locked -- -D warnings; \
	else echo 'SKIPPED: clippy is not installed (make setup)'; fi
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --locked

# Every order of the steps of two threads. A build directory of its own: all of it is built differently.
loom:
	RUSTFLAGS='--cfg loom' CARGO_TARGET_DIR='$(TARGET)/loom' \
		$(CARGO) test --release --locked -p zfolio-core --lib loom_

bench: build
	$(BIN)/zfolio bench usemem --against kernel

fuzz:
	@[ -d fuzz ] || { echo 'fuzz: there are no fuzz targets yet'; exit 1; }
	@cd fuzz && set -e; for target in $$($(CARGO) +nightly fuzz list); do \
		$(CARGO) +nightly fuzz run "$$target" -- -max_total_time=$(FUZZ_SECONDS); \
	done

install: build
	install -D -m 755 $(BIN)/zfolio $(DESTDIR)$(PREFIX)/bin/zfolio
	install -D -m 644 $(BIN)/libzfolio_preload.so $(DESTDIR)$(PREFIX)/lib/zfolio/libzfolio_preload.so

clean:
	$(CARGO) clean
