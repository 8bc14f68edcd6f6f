//! [`HeldPorts`]: ports of this machine that no other program takes until the tasks listen on them.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, SocketAddrAny, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt,
};

/// Free ports of 127.0.0.1, each held by a socket that is bound and does not listen.
///
/// Two sockets with `SO_REUSEADDR` may be bound to one port as long as neither listens. A task sets
/// that option, as servers do, so it can bind and listen while its port is held, and again after a
/// restart. The system gives a held port to nobody who asks for any free one, and programs without the
/// option are refused. To hand a listening socket down would need programs that take one.
#[derive(Debug)]
pub(super) struct HeldPorts {
    /// Closed when dropped. No child inherits them.
    _sockets: Vec<OwnedFd>,
    /// The addresses, as in a cluster.
    pub(super) addresses: Vec<String>,
}

impl HeldPorts {
    /// Takes free ports.
    ///
    /// # Errors
    /// If the system has no more sockets or ports.
    pub(super) fn take(count: usize) -> io::Result<HeldPorts> {
        let sockets = (0..count).map(|_| held(0)).collect::<io::Result<Vec<_>>>()?;
        let address =
            |socket: &OwnedFd| Ok(SocketAddrV4::try_from(getsockname(socket)?)?.to_string());
        let addresses = sockets.iter().map(address).collect::<io::Result<_>>()?;
        Ok(HeldPorts { _sockets: sockets, addresses })
    }

    /// Checks that ports from `base` on are free, and holds none: for programs that cannot listen on
    /// a held one.
    ///
    /// # Errors
    /// Returns the port that is taken, with the error.
    pub(super) fn check(base: u16, count: usize) -> Result<Vec<String>, (u32, io::Error)> {
        let ports = (u32::from(base)..).take(count).map(|port| {
            let beyond = |_| (port, io::Error::other("the last port is 65535"));
            held(u16::try_from(port).map_err(beyond)?).map_err(|error| (port, error))?;
            Ok(format!("{}:{port}", Ipv4Addr::LOCALHOST))
        });
        ports.collect()
    }
}

/// Returns a socket that is bound to a port of loopback; 0 for any free one.
fn held(port: u16) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrAny::from(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_held_port_is_left_to_a_server_and_given_to_nobody_else() {
        let held = HeldPorts::take(3).unwrap();
        let address = &held.addresses[0];
        // As programs that ask for a certain port without `SO_REUSEADDR`.
        let other =
            socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let address_of = address.parse::<SocketAddrV4>().unwrap();
        let refused = bind(other.unwrap(), &SocketAddrAny::from(address_of));
        assert_eq!(refused, Err(rustix::io::Errno::ADDRINUSE));
        // The standard library sets the option, as `pushpull-ps` and other servers do. A second start
        // of the same task finds the port free again.
        for _ in 0..2 {
            let listener = TcpListener::bind(address).unwrap();
            let client = std::net::TcpStream::connect(address).unwrap();
            drop((listener.accept().unwrap(), client));
        }
    }

    #[test]
    fn a_port_with_a_server_and_one_beyond_the_last_are_refused() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let (named, error) = HeldPorts::check(port, 1).unwrap_err();
        assert_eq!((named, error.kind()), (u32::from(port), io::ErrorKind::AddrInUse));
        let refused = (0..8).map(|_| HeldPorts::check(65_535, 2).unwrap_err().0);
        assert!(refused.into_iter().all(|port| port >= 65_535));
    }
}
