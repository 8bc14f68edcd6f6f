//! The connections that wait for their hello, and the choice of one to evict when there are too
//! many.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// The origin of a connection, the unit of fairness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PeerHost {
    /// An internet address. Of IPv6 only the first 64 bits count, because one host may own a whole
    /// /64.
    Internet(IpAddr),
    /// This host, through a Unix socket.
    Local,
}

impl PeerHost {
    /// Returns the host of an address.
    pub(crate) fn of(address: IpAddr) -> PeerHost {
        PeerHost::Internet(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from(u128::from(address) >> 64 << 64)),
            address => address,
        })
    }
}

impl fmt::Display for PeerHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerHost::Internet(address) => address.fmt(f),
            PeerHost::Local => f.write_str("this host"),
        }
    }
}

/// Accepted connections that belong to no shard yet.
///
/// A connection is *silent* until its hello arrives, and may be evicted. Then it is *greeted*: it
/// waits for its shard and may not be evicted.
///
/// Invariants: silent and greeted connections together are at most `limit`, but for those that were
/// evicted with their hello on its way; every listed host has a connection.
#[derive(Debug)]
pub(crate) struct WaitingConnections<T> {
    limit: usize,
    next: u64,
    /// The silent connections by host, in the order of their arrival.
    silent: BTreeMap<PeerHost, BTreeMap<u64, T>>,
    silent_count: usize,
    greeted: usize,
}

impl<T> WaitingConnections<T> {
    /// Returns an empty list of at most `limit` connections.
    pub(crate) fn new(limit: usize) -> WaitingConnections<T> {
        WaitingConnections { limit, next: 0, silent: BTreeMap::new(), silent_count: 0, greeted: 0 }
    }

    /// Whether another connection may be accepted: a place is free, or a silent connection can be
    /// evicted. Otherwise shards must first take connections that have said hello.
    pub(crate) fn can_accept(&self) -> bool {
        self.greeted < self.limit
    }

    /// Adds a connection and returns its number and the evicted connection, if any. The new
    /// connection is itself evicted only if it is the only silent one.
    pub(crate) fn arrive(&mut self, host: PeerHost, value: T) -> (u64, Option<T>) {
        let number = self.next;
        self.next += 1;
        // The newcomer counts for its host, so that a host with many connections evicts its own
        // first.
        self.silent.entry(host).or_default().insert(number, value);
        self.silent_count += 1;
        let are_too_many = self.silent_count + self.greeted > self.limit;
        (number, if are_too_many { self.evict() } else { None })
    }

    /// Removes the oldest silent connection of the host that has the most. Of several such hosts,
    /// takes the one with the oldest connection.
    pub(crate) fn evict(&mut self) -> Option<T> {
        let by_host = self.silent.iter().filter_map(|(&host, connections)| {
            let oldest = *connections.keys().next()?;
            Some((connections.len(), std::cmp::Reverse(oldest), host))
        });
        let (_, std::cmp::Reverse(oldest), host) = by_host.max()?;
        self.remove(host, oldest)
    }

    /// Marks a connection as greeted. One that was evicted before its hello was read takes a free
    /// place, or that of a silent connection, which is returned. If all places belong to greeted
    /// connections it is one more, and none is accepted until they are fewer.
    pub(crate) fn greet(&mut self, host: PeerHost, number: u64) -> Option<T> {
        self.remove(host, number);
        self.greeted += 1;
        let are_too_many = self.silent_count + self.greeted > self.limit;
        if are_too_many { self.evict() } else { None }
    }

    /// Removes a connection that closed before its hello.
    pub(crate) fn closed(&mut self, host: PeerHost, number: u64) {
        self.remove(host, number);
    }

    /// Removes a greeted connection, which its shard has taken or which has closed.
    pub(crate) fn handed_over(&mut self) {
        self.greeted -= 1;
    }

    fn remove(&mut self, host: PeerHost, number: u64) -> Option<T> {
        let connections = self.silent.get_mut(&host)?;
        let value = connections.remove(&number)?;
        if connections.is_empty() {
            self.silent.remove(&host);
        }
        self.silent_count -= 1;
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(last: u8) -> PeerHost {
        PeerHost::of(IpAddr::from([10, 0, 0, last]))
    }

    /// The connection that is evicted on the arrival of each of these, by its index.
    fn evicted(limit: usize, hosts: &[PeerHost]) -> Vec<Option<usize>> {
        let mut waiting = WaitingConnections::new(limit);
        let arrive = |(index, &host)| waiting.arrive(host, index).1;
        hosts.iter().enumerate().map(arrive).collect()
    }

    #[test]
    fn the_oldest_of_a_single_host_is_evicted() {
        assert_eq!(evicted(2, &[host(1); 5]), [None, None, Some(0), Some(1), Some(2)]);
        assert_eq!(evicted(1, &[PeerHost::Local; 3]), [None, Some(0), Some(1)]);
    }

    #[test]
    fn the_host_with_the_most_connections_loses_one() {
        let a = host(1);
        let b = host(2);
        let c = PeerHost::Local;
        let hosts = [b, a, a, a, c, c, c, c, c];
        // With the newcomer: a 3; then a 2, b 1, c 2, and a's oldest is older; then c has the most.
        let expected = [None, None, None, None, Some(1), Some(2), Some(4), Some(5), Some(6)];
        assert_eq!(evicted(4, &hosts), expected);
    }

    #[test]
    fn a_newcomer_of_a_new_host_is_not_evicted() {
        let hosts: Vec<PeerHost> = (0..6).map(host).collect();
        let expected = [None, None, None, Some(0), Some(1), Some(2)];
        assert_eq!(evicted(3, &hosts), expected);
    }

    #[test]
    fn a_crowd_of_one_host_never_evicts_another_host() {
        let mut waiting = WaitingConnections::new(8);
        let (honest, _) = waiting.arrive(host(1), usize::MAX);
        for index in 0..1000 {
            assert_ne!(waiting.arrive(host(2), index).1, Some(usize::MAX));
        }
        assert!(waiting.silent[&host(1)].contains_key(&honest));
        assert_eq!(waiting.greet(host(1), honest), None);
    }

    #[test]
    fn a_greeted_connection_is_not_evicted_and_counts_until_it_is_taken() {
        let mut waiting = WaitingConnections::new(2);
        let (first, _) = waiting.arrive(host(1), 1);
        assert_eq!(waiting.greet(host(1), first), None);
        assert_eq!(waiting.arrive(host(1), 2), (1, None));
        assert_eq!(waiting.arrive(host(2), 3), (2, Some(2)));
        assert!(waiting.can_accept(), "one can be evicted");
        assert_eq!(waiting.greet(host(2), 2), None);
        assert!(!waiting.can_accept());
        assert_eq!(waiting.arrive(host(3), 4), (3, Some(4)));
        waiting.handed_over();
        assert!(waiting.can_accept());
        assert_eq!(waiting.arrive(host(3), 5), (4, None));
        waiting.closed(host(3), 4);
        waiting.closed(host(3), 4);
        assert_eq!(waiting.arrive(host(4), 6), (5, None));
        assert_eq!((waiting.evict(), waiting.evict()), (Some(6), None));
    }

    #[test]
    fn an_evicted_connection_that_says_hello_takes_a_place_that_is_free_or_silent() {
        let mut waiting = WaitingConnections::new(2);
        for index in 0..4 {
            waiting.arrive(host(1), index);
        }
        assert_eq!(waiting.greet(host(1), 0), Some(2), "0 says hello, and 2 makes room");
        assert!(waiting.can_accept());
        assert_eq!(waiting.greet(host(1), 1), Some(3));
        assert_eq!(waiting.greet(host(1), 2), None, "2 says hello, and is one too many");
        waiting.handed_over();
        assert!(!waiting.can_accept(), "two are greeted");
        waiting.handed_over();
        assert!(waiting.can_accept());
    }

    #[test]
    fn an_ipv6_network_and_a_mapped_ipv4_address_are_one_host_each() {
        let of = |text: &str| PeerHost::of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
