//! Which connections wait for their hello, and which of them goes when there are too many.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

/// Whom a connection comes from, as far as fairness goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Host {
    /// An address of the internet. Of version 6 the first 64 bits, as a host has all of a network.
    Internet(IpAddr),
    /// This host, through a Unix socket.
    Local,
}

impl Host {
    /// The host behind an address.
    pub(super) fn of(address: IpAddr) -> Host {
        Host::Internet(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from(u128::from(address) >> 64 << 64)),
            address => address,
        })
    }
}

/// Connections that have been accepted and belong to no shard yet.
///
/// Those whose hello has not come are silent, and may be evicted; those whose hello has come wait for
/// their shard to take them, and may not.
///
/// Invariants: silent and greeted connections together are at most `limit`; no host is listed without a
/// connection.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    limit: usize,
    next: u64,
    /// By host, in the order of their coming.
    silent: BTreeMap<Host, BTreeMap<u64, T>>,
    silent_count: usize,
    greeted: usize,
}

impl<T> Waiting<T> {
    /// None so far, and at most so many.
    pub(super) fn new(limit: usize) -> Waiting<T> {
        Waiting { limit, next: 0, silent: BTreeMap::new(), silent_count: 0, greeted: 0 }
    }

    /// Whether another connection may come: there is room, or somebody to be evicted for it. Otherwise all
    /// have said hello, and their shards are to take them first.
    pub(super) fn has_room(&self) -> bool {
        self.silent_count > 0 || self.greeted < self.limit
    }

    /// A connection has come: its number, and the one that is evicted for it. That is the newcomer
    /// itself only if there was no room.
    pub(super) fn arrive(&mut self, host: Host, value: T) -> (u64, Option<T>) {
        let number = self.next;
        self.next += 1;
        // It counts among those of its host, so that a host makes room for itself first.
        self.silent.entry(host).or_default().insert(number, value);
        self.silent_count += 1;
        let are_too_many = self.silent_count + self.greeted > self.limit;
        (number, if are_too_many { self.evict() } else { None })
    }

    /// Takes the oldest of the host that has the most silent connections; of several such hosts, of the
    /// one whose oldest is older.
    pub(super) fn evict(&mut self) -> Option<T> {
        let by_host = self.silent.iter().filter_map(|(&host, connections)| {
            let oldest = *connections.keys().next()?;
            Some((connections.len(), std::cmp::Reverse(oldest), host))
        });
        let (_, std::cmp::Reverse(oldest), host) = by_host.max()?;
        self.remove(host, oldest)
    }

    /// The hello of a connection has come; false if it was evicted before.
    pub(super) fn greet(&mut self, host: Host, number: u64) -> bool {
        let silent = self.remove(host, number).is_some();
        self.greeted += usize::from(silent);
        silent
    }

    /// A connection is gone before its hello came.
    pub(super) fn gone(&mut self, host: Host, number: u64) {
        self.remove(host, number);
    }

    /// A connection that has said hello is its shard's, or gone.
    pub(super) fn taken(&mut self) {
        self.greeted -= 1;
    }

    fn remove(&mut self, host: Host, number: u64) -> Option<T> {
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

    fn host(last: u8) -> Host {
        Host::of(IpAddr::from([10, 0, 0, last]))
    }

    /// Who is evicted for each of these in turn; they are called by their place.
    fn evicted(limit: usize, hosts: &[Host]) -> Vec<Option<usize>> {
        let mut waiting = Waiting::new(limit);
        let arrive = |(index, &host)| waiting.arrive(host, index).1;
        hosts.iter().enumerate().map(arrive).collect()
    }

    #[test]
    fn the_oldest_goes_when_all_are_of_one_host() {
        assert_eq!(evicted(2, &[host(1); 5]), [None, None, Some(0), Some(1), Some(2)]);
        assert_eq!(evicted(1, &[Host::Local; 3]), [None, Some(0), Some(1)]);
    }

    #[test]
    fn the_host_that_has_most_makes_room_whoever_comes() {
        let (a, b, c) = (host(1), host(2), Host::Local);
        let hosts = [b, a, a, a, c, c, c, c, c];
        // With the newcomer: a 3; a 2, b 1, c 2, and a's is older; then c has most.
        let expected = [None, None, None, None, Some(1), Some(2), Some(4), Some(5), Some(6)];
        assert_eq!(evicted(4, &hosts), expected);
    }

    #[test]
    fn a_newcomer_of_a_new_host_is_not_the_one_to_go() {
        let hosts: Vec<Host> = (0..6).map(host).collect();
        let expected = [None, None, None, Some(0), Some(1), Some(2)];
        assert_eq!(evicted(3, &hosts), expected);
    }

    #[test]
    fn a_crowd_of_one_host_never_costs_another_its_place() {
        let mut waiting = Waiting::new(8);
        let (honest, _) = waiting.arrive(host(1), usize::MAX);
        for index in 0..1000 {
            assert_ne!(waiting.arrive(host(2), index).1, Some(usize::MAX));
        }
        assert!(waiting.greet(host(1), honest));
    }

    #[test]
    fn who_has_said_hello_is_not_evicted_and_counts_until_it_is_taken() {
        let mut waiting = Waiting::new(2);
        let (first, _) = waiting.arrive(host(1), 1);
        assert!(waiting.greet(host(1), first));
        assert_eq!(waiting.arrive(host(1), 2), (1, None));
        assert_eq!(waiting.arrive(host(2), 3), (2, Some(2)));
        assert!(!waiting.greet(host(1), 1), "it was evicted");
        assert!(waiting.has_room(), "one can be evicted");
        assert!(waiting.greet(host(2), 2));
        assert!(!waiting.has_room());
        assert_eq!(waiting.arrive(host(3), 4), (3, Some(4)));
        waiting.taken();
        assert!(waiting.has_room());
        assert_eq!(waiting.arrive(host(3), 5), (4, None));
        waiting.gone(host(3), 4);
        waiting.gone(host(3), 4);
        assert_eq!(waiting.arrive(host(4), 6), (5, None));
        assert_eq!((waiting.evict(), waiting.evict()), (Some(6), None));
    }

    #[test]
    fn a_network_of_version_6_is_one_host_and_a_mapped_address_that_of_version_4() {
        let of = |text: &str| Host::of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
