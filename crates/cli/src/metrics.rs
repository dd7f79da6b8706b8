//! `--metrics`, of `zfolio run` and of disks: where figures are served for Prometheus.

use std::net::SocketAddr;

use zfolio_block::metrics::Address;

use crate::failure::Failure;

/// Reads the option's value.
pub(crate) fn parse_metrics(given: &str) -> Result<SocketAddr, String> {
    let numbers = given.strip_prefix("localhost:").map(|port| format!("127.0.0.1:{port}"));
    let address = numbers.as_deref().unwrap_or(given).parse().ok();
    address.filter(|address: &SocketAddr| address.ip().is_loopback()).ok_or_else(|| {
        format!(
            "'{given}' is not an address of this machine with a port; accepted: localhost:PORT, 127.0.0.1:PORT, \
             [::1]:PORT; PORT is 0 to 65535"
        )
    })
}

/// Takes the address, if there is one.
pub(crate) fn take_address(address: Option<SocketAddr>) -> Result<Option<Address>, Failure> {
    let taken = address.map(Address::take).transpose();
    taken.map_err(|error| {
        let address = address.map(|address| address.to_string()).unwrap_or_default();
        Failure::machine(format!("--metrics: {address}: {error}"))
    })
}
