//! Hosts with slots, and the places of tasks on them.

use std::fmt;
use std::str::FromStr;

/// A host, with the number of tasks that may run on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostSlots {
    /// The name, as the agent takes it and as addresses contain it.
    pub(super) name: String,
    /// The number of tasks.
    pub(super) slots: usize,
}

/// The reason why a text names no host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostError {
    /// The name is empty or has other characters.
    Name,
    /// The number is none from 1 on.
    Slots,
}

impl std::error::Error for HostError {}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HostError::Name => {
                "a host is a name, an IPv4 address or an IPv6 address in brackets, of letters, digits \
                 and the characters - . _ @"
            }
            HostError::Slots => "behind the colon is the number of tasks of the host, from 1 to 65535",
        })
    }
}

impl FromStr for HostSlots {
    type Err = HostError;

    /// Parses `host:4`, or `host` for one slot. An IPv6 address is in brackets. A user may be in
    /// front, as in `user@host`: the agent gets it, the addresses do not.
    fn from_str(text: &str) -> Result<HostSlots, HostError> {
        let bracket = text.rfind(']').map_or(0, |end| end + 1);
        let colon = text[bracket..].find(':').map(|colon| bracket + colon);
        let (name, slots) = match colon {
            None => (text, 1),
            Some(colon) => {
                let slots = text[colon + 1..].parse::<u16>().map_err(|_| HostError::Slots)?;
                (&text[..colon], usize::from(slots))
            }
        };
        if slots == 0 {
            return Err(HostError::Slots);
        }
        if is_name(name) {
            Ok(HostSlots { name: name.to_owned(), slots })
        } else {
            Err(HostError::Name)
        }
    }
}

impl HostSlots {
    /// Returns the host as it is in an address.
    pub(super) fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&*self.name, |(_, host)| host)
    }
}

/// Returns whether an agent can take the name for nothing but a host.
fn is_name(name: &str) -> bool {
    let host = name.rsplit_once('@').map_or(name, |(_, host)| host);
    let is_v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_v6 = is_v6.is_some_and(|host| host.parse::<std::net::Ipv6Addr>().is_ok());
    let is_plain = |text: &str| {
        let is_known = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
        !text.is_empty() && !text.starts_with('-') && text.chars().all(is_known)
    };
    let user = name.rsplit_once('@').map(|(user, _)| user);
    user.is_none_or(is_plain) && (is_v6 || is_plain(host))
}

/// The reason why tasks have no places on hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PlaceError {
    /// There are more tasks than slots.
    Slots { tasks: usize, slots: usize },
    /// A host is listed twice.
    Twice(String),
    /// The ports of a host would pass the last one.
    Ports { host: String, base: u16 },
}

impl std::error::Error for PlaceError {}

impl fmt::Display for PlaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlaceError::Slots { tasks, slots } => write!(
                f,
                "--hosts: {tasks} tasks need as many slots, and the hosts have {slots}: give a host \
                 more, as in host:{tasks}"
            ),
            PlaceError::Twice(host) => {
                write!(f, "--hosts: {host} is listed twice: give it once, with all its slots")
            }
            PlaceError::Ports { host, base } => {
                write!(f, "--base-port {base}: the tasks of {host} need ports beyond 65535")
            }
        }
    }
}

/// The place of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The index of the host.
    pub(super) host: usize,
    /// The address of the task in the cluster.
    pub(super) address: String,
}

/// Places the ps tasks, one on each host in turn, then the workers in the slots that are left, host
/// by host. The tasks of a host have ports from `base` on.
pub(super) fn place(
    hosts: &[HostSlots],
    num_ps: usize,
    num_workers: usize,
    base: u16,
) -> Result<(Vec<Place>, Vec<Place>), PlaceError> {
    let tasks = num_ps + num_workers;
    let slots = hosts.iter().map(|host| host.slots).sum();
    if tasks > slots {
        return Err(PlaceError::Slots { tasks, slots });
    }
    let twice = hosts.iter().enumerate().find(|(index, host)| {
        hosts[..*index].iter().any(|before| before.address() == host.address())
    });
    if let Some((_, host)) = twice {
        return Err(PlaceError::Twice(host.name.clone()));
    }
    let mut used = vec![0; hosts.len()];
    let mut put = |host: usize| {
        // A host has at most 65535 slots.
        let port = u16::try_from(used[host]).ok().and_then(|used| base.checked_add(used));
        let name = &hosts[host];
        let error = || PlaceError::Ports { host: name.name.clone(), base };
        let address = format!("{}:{}", name.address(), port.ok_or_else(error)?);
        used[host] += 1;
        Ok(Place { host, address })
    };
    let rounds = (0..).take(num_ps).flat_map(|round| {
        let with_room = move |(_, host): &(usize, &HostSlots)| host.slots > round;
        hosts.iter().enumerate().filter(with_room).map(|(index, _)| index)
    });
    let ps: Vec<Place> = rounds.take(num_ps).map(&mut put).collect::<Result<_, _>>()?;
    let on_host = |index: usize| ps.iter().filter(|place| place.host == index).count();
    let free = hosts.iter().enumerate();
    let free =
        free.flat_map(|(index, host)| std::iter::repeat_n(index, host.slots - on_host(index)));
    let workers = free.take(num_workers).map(&mut put).collect::<Result<_, _>>()?;
    Ok((ps, workers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_a_name_and_slots() {
        let table = [
            ("a", "a", 1),
            ("a:4", "a", 4),
            ("10.77.0.1:2", "10.77.0.1", 2),
            ("[fe80::1]:3", "[fe80::1]", 3),
            ("[::1]", "[::1]", 1),
            ("me@node-1.example_x:65535", "me@node-1.example_x", 65_535),
        ];
        for (text, name, slots) in table {
            assert_eq!(text.parse(), Ok(HostSlots { name: name.into(), slots }), "{text}");
        }
        let refused = [
            ("", HostError::Name),
            (":4", HostError::Name),
            // An agent would take it for an option.
            ("-oProxyCommand=x:1", HostError::Name),
            ("me@-x", HostError::Name),
            ("a b:1", HostError::Name),
            ("$(reboot)", HostError::Name),
            ("[::1", HostError::Slots),
            ("[x]:1", HostError::Name),
            ("a:0", HostError::Slots),
            ("a:-1", HostError::Slots),
            ("a:x", HostError::Slots),
            ("a:65536", HostError::Slots),
            ("fe80::1", HostError::Slots),
        ];
        for (text, error) in refused {
            assert_eq!(text.parse::<HostSlots>(), Err(error), "{text}");
        }
    }

    fn hosts(text: &str) -> Vec<HostSlots> {
        text.split(',').map(|host| host.parse().unwrap()).collect()
    }

    fn placed(text: &str, num_ps: usize, num_workers: usize) -> Result<String, PlaceError> {
        let (ps, workers) = place(&hosts(text), num_ps, num_workers, 2222)?;
        let list = |places: &[Place]| {
            let addresses: Vec<&str> = places.iter().map(|place| &*place.address).collect();
            addresses.join(",")
        };
        Ok(format!("{} {}", list(&ps), list(&workers)))
    }

    #[test]
    fn ps_tasks_go_to_the_hosts_in_turn_and_workers_to_the_slots_that_are_left() {
        let table = [
            ("a:4,b:4", 2, 6, "a:2222,b:2222 a:2223,a:2224,a:2225,b:2223,b:2224,b:2225"),
            ("a:4,b:4", 1, 1, "a:2222 a:2223"),
            ("a,b:3", 3, 1, "a:2222,b:2222,b:2223 b:2224"),
            ("a:2,b,c:2", 4, 0, "a:2222,b:2222,c:2222,a:2223 "),
            ("me@a:2", 1, 1, "a:2222 a:2223"),
        ];
        for (hosts, num_ps, num_workers, expected) in table {
            assert_eq!(placed(hosts, num_ps, num_workers).as_deref(), Ok(expected), "{hosts}");
        }
    }

    #[test]
    fn too_few_slots_a_host_twice_and_ports_beyond_the_last_are_refused() {
        assert_eq!(placed("a:2,b", 2, 2), Err(PlaceError::Slots { tasks: 4, slots: 3 }));
        assert_eq!(placed("a:2,me@a:2", 2, 2), Err(PlaceError::Twice("me@a".into())));
        let beyond = place(&hosts("a:4"), 2, 2, 65_534);
        assert_eq!(beyond, Err(PlaceError::Ports { host: "a".into(), base: 65_534 }));
        assert!(place(&hosts("a:2"), 1, 1, 65_534).is_ok());
    }
}
