//! The syntax of a task's address.

use core::net::Ipv6Addr;

use thiserror::Error;

use super::ClusterSpec;

/// The reason why a text is not an address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AddressProblem {
    /// A ps task is listed without an address.
    #[error("workers find a ps task by its address")]
    Absent,
    /// The text is longer than [`ClusterSpec::ADDRESS_BYTES_MAX`].
    #[error("it has {bytes} bytes: the limit is {}", ClusterSpec::ADDRESS_BYTES_MAX)]
    TooLong {
        /// The length of the text.
        bytes: usize,
    },
    /// The text does not end in `:port`.
    #[error("it is neither host:port, [v6]:port nor unix:/path")]
    NoPort,
    /// The text is a URL.
    #[error("it begins with a scheme: write host:port alone")]
    Scheme,
    /// The host before the port is empty.
    #[error("its host is empty")]
    EmptyHost,
    /// The host has a character that no host name has.
    #[error("its host has the character {character:?}")]
    Host {
        /// The first such character.
        character: char,
    },
    /// The text between the brackets is not an IPv6 address.
    #[error("it has no IPv6 address between its brackets")]
    Ipv6,
    /// The port after the last colon is empty.
    #[error("its port is empty")]
    EmptyPort,
    /// The port is not a number from 1 to 65535 in plain decimal digits.
    #[error("its port is not a number from 1 to 65535")]
    Port,
    /// The path is not absolute, or is longer than a socket's name may be.
    #[error("its path is not absolute with at most {UNIX_PATH_BYTES_MAX} bytes")]
    UnixPath,
    /// The path has a character that the text or JSON form of a cluster cannot carry.
    #[error("its path has the character {character:?}")]
    UnixCharacter {
        /// The first such character.
        character: char,
    },
}

/// Checks an address and returns its canonical spelling, equal for all spellings of one address.
///
/// Host names are compared without case and IPv6 addresses by value. Names are not resolved. The
/// scheme `grpc` is left out.
pub(crate) fn canonical(address: &str) -> Result<String, AddressProblem> {
    let address = without_scheme(address);
    if address.len() > ClusterSpec::ADDRESS_BYTES_MAX {
        return Err(AddressProblem::TooLong { bytes: address.len() });
    }
    if let Some(path) = address.strip_prefix("unix:") {
        // `unix:1234` is the port of a host called "unix". Any other suffix is a path.
        if path.parse::<u16>().is_err() {
            return check_path(path).map(|()| address.to_owned());
        }
    }
    if address.contains("://") {
        return Err(AddressProblem::Scheme);
    }
    let (host, port) = address.rsplit_once(':').ok_or(AddressProblem::NoPort)?;
    let host = canonical_host(host)?;
    Ok(format!("{host}:{}", check_port(port)?))
}

/// Returns an address without the scheme that classic targets have.
pub fn without_scheme(address: &str) -> &str {
    address.strip_prefix("grpc://").unwrap_or(address)
}

fn canonical_host(host: &str) -> Result<String, AddressProblem> {
    if host.is_empty() {
        return Err(AddressProblem::EmptyHost);
    }
    if let Some(inner) = host.strip_prefix('[') {
        let inner = inner.strip_suffix(']').ok_or(AddressProblem::Ipv6)?;
        let v6: Ipv6Addr = inner.parse().map_err(|_| AddressProblem::Ipv6)?;
        return Ok(format!("[{v6}]"));
    }
    match host.chars().find(|&c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))) {
        Some(character) => Err(AddressProblem::Host { character }),
        None => Ok(host.to_ascii_lowercase()),
    }
}

/// Parses a port. Port 0 is rejected: it asks the system for any port, so no task could dial it.
fn check_port(port: &str) -> Result<u16, AddressProblem> {
    if port.is_empty() {
        return Err(AddressProblem::EmptyPort);
    }
    // A leading zero or a sign would be a second spelling of the same address.
    let plain = port.bytes().all(|byte| byte.is_ascii_digit()) && !port.starts_with('0');
    match port.parse() {
        Ok(number) if plain => Ok(number),
        _ => Err(AddressProblem::Port),
    }
}

fn check_path(path: &str) -> Result<(), AddressProblem> {
    if !path.starts_with('/') || path.len() < 2 || path.len() > UNIX_PATH_BYTES_MAX {
        return Err(AddressProblem::UnixPath);
    }
    match path.chars().find(|&c| c.is_control() || matches!(c, ',' | ';' | '"' | '\\')) {
        Some(character) => Err(AddressProblem::UnixCharacter { character }),
        None => Ok(()),
    }
}

/// `sun_path` has 108 bytes on Linux, including the final zero.
const UNIX_PATH_BYTES_MAX: usize = 107;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_addresses_become_canonical() {
        let table = [
            ("a:1", "a:1"),
            ("Host-1.example_x:65535", "host-1.example_x:65535"),
            ("10.0.0.1:2222", "10.0.0.1:2222"),
            ("[::1]:80", "[::1]:80"),
            ("[0:0:0:0:0:0:0:1]:80", "[::1]:80"),
            ("unix:/run/ps 0.sock", "unix:/run/ps 0.sock"),
            ("unix:80", "unix:80"),
            ("grpc://a:1", "a:1"),
        ];
        for (address, expected) in table {
            assert_eq!(canonical(address).as_deref(), Ok(expected), "{address}");
        }
    }

    #[test]
    fn invalid_addresses_are_rejected() {
        use AddressProblem::*;
        let table = [
            ("", NoPort),
            ("a", NoPort),
            (":1", EmptyHost),
            ("a:", EmptyPort),
            ("a:0", Port),
            ("a:01", Port),
            ("a:+1", Port),
            ("a:65536", Port),
            ("a:b", Port),
            ("a b:1", Host { character: ' ' }),
            ("1@a:1", Host { character: '@' }),
            ("::1:80", Host { character: ':' }),
            ("http://a:1", Scheme),
            ("grpc://grpc://a:1", Scheme),
            ("grpc://http://a:1", Scheme),
            ("grpc://", NoPort),
            ("[::1:80", Ipv6),
            ("[]:80", Ipv6),
            ("[::1]", Ipv6),
            ("unix:", UnixPath),
            ("unix:/", UnixPath),
            ("unix:x.sock", UnixPath),
            ("unix:/a,b", UnixCharacter { character: ',' }),
        ];
        for (address, expected) in table {
            assert_eq!(canonical(address), Err(expected), "{address}");
        }
        let long = format!("{}:1", "a".repeat(254));
        assert_eq!(canonical(&long), Err(TooLong { bytes: 256 }));
        assert!(canonical(&long[1..]).is_ok());
        assert_eq!(canonical(&format!("unix:/{}", "a".repeat(107))), Err(UnixPath));
    }
}
