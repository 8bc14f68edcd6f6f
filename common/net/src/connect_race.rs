//! [`ConnectRace`]: when to try which address of a name, as in Happy Eyeballs (RFC 8305).

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The pause before the next address is tried beside those that have not answered yet: the
/// Connection Attempt Delay of RFC 8305, section 5.
const STAGGER: Duration = Duration::from_millis(250);

/// The end of an attempt to connect.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttemptEnd {
    /// It was not begun: the time was over before.
    NotTried,
    /// The address has neither accepted nor refused.
    Silent,
    /// The address has refused, or the system has: its error.
    Failed(String),
}

impl fmt::Display for AttemptEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttemptEnd::NotTried => f.write_str("not tried"),
            AttemptEnd::Silent => f.write_str("no answer"),
            AttemptEnd::Failed(error) => f.write_str(error),
        }
    }
}

/// The next step of a [`ConnectRace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RaceStep {
    /// Begin an attempt with the address of this index.
    Start(usize),
    /// Wait for the attempts under way, at most until this time.
    Wait(Instant),
    /// No address is left, or the time is over.
    Lost,
}

/// The attempts to connect to the addresses of one name. The first that succeeds wins.
///
/// Invariants: the addresses are started in order, each once. An attempt begins when the one before
/// it has failed, or has been silent for the stagger.
#[derive(Debug)]
pub(crate) struct ConnectRace {
    attempts: Vec<(SocketAddr, AttemptEnd)>,
    started: usize,
    next_at: Instant,
    stagger: Duration,
    deadline: Instant,
}

impl ConnectRace {
    /// Returns a race between these addresses that ends after `limit`. If there are many, they are
    /// tried faster, so that the last has at least half of the time.
    pub(crate) fn new(now: Instant, addresses: &[SocketAddr], limit: Duration) -> ConnectRace {
        let share = limit / 2 / u32::try_from(addresses.len()).unwrap_or(u32::MAX).max(1);
        ConnectRace {
            attempts: addresses.iter().map(|&address| (address, AttemptEnd::NotTried)).collect(),
            started: 0,
            next_at: now,
            stagger: STAGGER.min(share),
            deadline: now + limit,
        }
    }

    /// Returns what to do next.
    pub(crate) fn poll(&mut self, now: Instant) -> RaceStep {
        if now >= self.deadline {
            return RaceStep::Lost;
        }
        if self.started == self.attempts.len() {
            let is_open = self.attempts.iter().any(|(_, end)| *end == AttemptEnd::Silent);
            return if is_open { RaceStep::Wait(self.deadline) } else { RaceStep::Lost };
        }
        if now < self.next_at {
            return RaceStep::Wait(self.next_at.min(self.deadline));
        }
        let index = self.started;
        self.started += 1;
        self.next_at = now + self.stagger;
        self.attempts[index].1 = AttemptEnd::Silent;
        RaceStep::Start(index)
    }

    /// Records that an attempt has failed. The next one begins at once.
    pub(crate) fn failed(&mut self, now: Instant, index: usize, error: String) {
        self.attempts[index].1 = AttemptEnd::Failed(error);
        self.next_at = now;
    }

    /// Returns the addresses that have not answered.
    pub(crate) fn silent(&self) -> impl Iterator<Item = SocketAddr> {
        let silent = self.attempts.iter().filter(|(_, end)| *end == AttemptEnd::Silent);
        silent.map(|(address, _)| *address)
    }

    /// Returns the address of an attempt.
    pub(crate) fn address(&self, index: usize) -> SocketAddr {
        self.attempts[index].0
    }

    /// Returns the addresses with the ends of their attempts.
    pub(crate) fn into_attempts(self) -> Vec<(SocketAddr, AttemptEnd)> {
        self.attempts
    }
}

/// The addresses of a name by how the last attempts to reach it ended.
#[derive(Debug, Default)]
pub(crate) struct KnownAddresses {
    /// The address whose server has answered last.
    answered: Option<SocketAddr>,
    /// Addresses that have said nothing since they were last tried.
    silent: Vec<SocketAddr>,
}

impl KnownAddresses {
    /// Sorts resolved addresses into the order in which they are tried: the one that has answered
    /// last, then those without a history, then those that were silent. Address families alternate
    /// (RFC 8305, section 4); otherwise the resolver's order stays.
    pub(crate) fn order(&mut self, resolved: Vec<SocketAddr>) -> Vec<SocketAddr> {
        self.silent.retain(|silent| resolved.contains(silent));
        let mut addresses = alternate_families(resolved);
        addresses.sort_by_key(|address| match address {
            address if self.answered == Some(*address) => 0,
            address if self.silent.contains(address) => 2,
            _ => 1,
        });
        addresses
    }

    /// Records that an address has said nothing. It is tried last from now on, until its server
    /// answers.
    pub(crate) fn silent(&mut self, address: SocketAddr) {
        self.answered = self.answered.filter(|&answered| answered != address);
        if !self.silent.contains(&address) {
            self.silent.push(address);
        }
    }

    /// Records that the server at an address has answered.
    pub(crate) fn answered(&mut self, address: SocketAddr) {
        self.silent.retain(|&silent| silent != address);
        self.answered = Some(address);
    }
}

/// Returns the addresses without repetitions, one of each family in turn.
fn alternate_families(resolved: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let mut distinct: Vec<SocketAddr> = Vec::new();
    for address in resolved {
        if !distinct.contains(&address) {
            distinct.push(address);
        }
    }
    let first_is_v6 = distinct.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) =
        distinct.into_iter().partition(|address| address.is_ipv6() == first_is_v6);
    let count = first.len().max(second.len());
    let pick = |index: usize| [first.get(index), second.get(index)].into_iter().flatten().copied();
    (0..count).flat_map(pick).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 1))
    }

    fn v6(last: u16) -> SocketAddr {
        SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, last], 1))
    }

    const LIMIT: Duration = Duration::from_secs(5);

    /// Plays a race in virtual time, in which no address accepts. `refuses` says after how long each
    /// address refuses; `None` if it stays silent. Returns when each attempt began and when the race
    /// was lost, in milliseconds, and the ends.
    fn play(refuses: &[Option<u64>], limit: Duration) -> (Vec<u128>, u128, Vec<AttemptEnd>) {
        let start = Instant::now();
        let addresses: Vec<SocketAddr> = (0..refuses.len()).map(|n| v4(n as u8)).collect();
        let mut race = ConnectRace::new(start, &addresses, limit);
        let mut now = start;
        let mut began = Vec::new();
        let mut refusals = Vec::new();
        loop {
            match race.poll(now) {
                RaceStep::Start(index) => {
                    began.push((now - start).as_millis());
                    if let Some(after) = refuses[index] {
                        refusals.push((now + Duration::from_millis(after), index));
                    }
                }
                RaceStep::Wait(until) => {
                    refusals.sort();
                    match refusals.first().copied().filter(|&(at, _)| at <= until) {
                        Some((at, index)) => {
                            now = at;
                            refusals.remove(0);
                            race.failed(now, index, "refused".to_owned());
                        }
                        None => now = until,
                    }
                }
                RaceStep::Lost => {
                    let ends = race.into_attempts().into_iter().map(|(_, end)| end).collect();
                    return (began, (now - start).as_millis(), ends);
                }
            }
        }
    }

    #[test]
    fn addresses_are_tried_one_by_one_with_a_stagger_and_one_limit() {
        let refused = || AttemptEnd::Failed("refused".to_owned());
        // One silent address takes the whole time, and no other waits for it.
        let (began, lost, ends) = play(&[None, Some(1), None], LIMIT);
        assert_eq!((began, lost), (vec![0, 250, 251], 5000));
        assert_eq!(ends, [AttemptEnd::Silent, refused(), AttemptEnd::Silent]);
        // Refusals are answered by the next address at once, and the last ends the race.
        assert_eq!(play(&[Some(1); 3], LIMIT).0, [0, 1, 2]);
        assert_eq!(play(&[Some(1); 3], LIMIT).1, 3);
        // A refusal that comes after the next attempt has begun begins the one after it.
        assert_eq!(play(&[Some(300), None, None], LIMIT).0, [0, 250, 300]);
        assert_eq!(play(&[], LIMIT), (vec![], 0, vec![]));
    }

    #[test]
    fn the_last_of_many_addresses_has_half_of_the_time() {
        let (began, lost, _) = play(&[None; 100], LIMIT);
        assert_eq!((began.len(), began[99], lost), (100, 2475, 5000));
        let (began, lost, _) = play(&[None; 4], Duration::from_millis(100));
        assert_eq!((began, lost), (vec![0, 12, 25, 37], 100));
    }

    #[test]
    fn families_alternate_and_repetitions_go() {
        let mut known = KnownAddresses::default();
        let resolved = vec![v6(1), v6(2), v6(1), v6(3), v4(1), v4(2), v4(1)];
        assert_eq!(known.order(resolved), [v6(1), v4(1), v6(2), v4(2), v6(3)]);
        assert_eq!(known.order(vec![v4(1), v4(2), v6(1)]), [v4(1), v6(1), v4(2)]);
    }

    #[test]
    fn a_silent_address_is_tried_last_and_one_that_has_answered_first() {
        let all = || vec![v4(1), v4(2), v4(3)];
        let mut known = KnownAddresses::default();
        known.silent(v4(1));
        assert_eq!(known.order(all()), [v4(2), v4(3), v4(1)]);
        known.answered(v4(3));
        assert_eq!(known.order(all()), [v4(3), v4(2), v4(1)]);
        known.silent(v4(3));
        assert_eq!(known.order(all()), [v4(2), v4(1), v4(3)]);
        known.answered(v4(1));
        assert_eq!(known.order(all()), [v4(1), v4(2), v4(3)]);
        // What the name does not mean any more is forgotten.
        assert_eq!(known.order(vec![v4(1)]), [v4(1)]);
        assert_eq!(known.order(all()), [v4(1), v4(2), v4(3)]);
    }
}
