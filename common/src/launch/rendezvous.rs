//! The address of the rendezvous, as a launcher or a person passes it.

use crate::protocol::limits;

use super::error::clip;
use super::{LaunchError, Launcher, Lookup};

/// The variable with the address.
pub(crate) const VARIABLE: &str = "PUSHPULL_RENDEZVOUS";

/// Reads the address `host:port` of the rendezvous, if it is set.
pub(super) fn read(lookup: Lookup<'_>, launcher: Launcher) -> Result<Option<String>, LaunchError> {
    if let Some(address) = lookup(VARIABLE) {
        return check(VARIABLE, address).map(Some);
    }
    // The agent of torchrun listens at this address itself.
    let has_agent = lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    if launcher != Launcher::Torchrun || has_agent {
        return Ok(None);
    }
    match (lookup("MASTER_ADDR"), lookup("MASTER_PORT")) {
        (Some(host), Some(port)) => check("MASTER_ADDR:MASTER_PORT", join(&host, &port)).map(Some),
        _ => Ok(None),
    }
}

/// Joins a host and a port that a launcher passes apart.
pub(crate) fn join(host: &str, port: &str) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

/// Checks that an address has the form `host:port`, and returns it.
///
/// # Errors
/// [`LaunchError::Rendezvous`] with the name of its flag or variable.
pub(crate) fn check(variable: &'static str, address: String) -> Result<String, LaunchError> {
    match is_host_and_port(&address) {
        true => Ok(address),
        false => Err(LaunchError::Rendezvous { variable, value: clip(&address) }),
    }
}

/// Returns whether an address has the form `host:port` or `[v6]:port`. The network resolves it.
fn is_host_and_port(address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else {
        return false;
    };
    let is_port = port.bytes().all(|byte| byte.is_ascii_digit())
        && port.parse::<u16>().is_ok_and(|port| port != 0);
    let is_host = match host.strip_prefix('[') {
        Some(inner) => {
            inner.strip_suffix(']').is_some_and(|v6| v6.parse::<core::net::Ipv6Addr>().is_ok())
        }
        None => {
            let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            !host.is_empty() && host.len() <= limits::HOST_BYTES_MAX && host.chars().all(is_part)
        }
    };
    is_port && is_host
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        let long = format!("{}:1", "h".repeat(limits::HOST_BYTES_MAX + 1));
        for address in ["a:1", "node-1.example_x:65535", "10.0.0.1:29500", "[::1]:80"] {
            assert!(is_host_and_port(address), "{address}");
        }
        let refused = [
            "",
            "a",
            ":1",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            "a b:1",
            "::1:80",
            "[::1:80",
            "[x]:80",
            "unix:/a",
            "http://a:80",
            "a:1 ",
            &long,
        ];
        for address in refused {
            assert!(!is_host_and_port(address), "{address}");
        }
    }
}
