//! The checks of hellos and of requests for a place: a refused peer has changed nothing.

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, Incarnation};
use pushpull_common::protocol::limits::RING_SIZE_MAX;
use pushpull_common::protocol::message::{Hello, RingJoin, Role};
use pushpull_common::protocol::refusal::{Detail, Refusal};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Features, Message};

use super::Rendezvous;
use super::places::Claim;

impl Rendezvous {
    /// # Errors
    /// The refusal of a peer of another version, role, job or build, or of one too many.
    pub(super) fn check_hello(&self, hello: &Hello, identity: &Identity) -> Result<(), Refusal> {
        hello.agree(Features::ALL)?;
        if hello.role != (Role::Rank {}) {
            let kind = Message::from(hello.clone()).kind();
            return Err(Refusal::Role { role: hello.role.code(), kind });
        }
        if hello.job.as_str() != self.config.job {
            return Err(self.difference("job", &self.config.job, hello.job.as_str(), identity));
        }
        self.check_identity(identity)?;
        if self.connections.len() >= CONNECTIONS_MAX {
            let what = Detail::clipped("connections to the rendezvous");
            return Err(Refusal::Busy { what, limit: CONNECTIONS_MAX as u64 });
        }
        Ok(())
    }

    /// # Errors
    /// The refusal of a member that cannot be in the next ring.
    pub(super) fn check_join(&self, connection: u64, join: &RingJoin) -> Result<(), Refusal> {
        if self.is_stopping {
            return Err(Refusal::Stopping {});
        }
        let Some(peer) = self.connections.get(connection) else { return Ok(()) };
        let fault = |text: String| {
            let kind = Message::from(join.clone()).kind();
            Err(Refusal::Unsupported { kind, detail: Detail::shortened(text) })
        };
        let id = join.id.as_str();
        if id.is_empty() {
            return fault("the member has no id".to_owned());
        }
        if let Some(known) = self.id_of(connection)
            && known != id
        {
            return fault(format!("member {known:?} cannot be {id:?} as well"));
        }
        self.check_epoch(connection, join).or_else(fault)?;
        self.check_size(join, &peer.identity)?;
        // A process that has come before a newer one of its id, and comes again.
        if self.fences.contains(id, peer.incarnation) {
            let current = self.incarnation_of(id).unwrap_or_default();
            return Err(fenced(peer.incarnation, current));
        }
        self.check_identity(&peer.identity)?;
        self.check_index(join)?;
        match self.holder_of_id(id) {
            None if self.members() >= RING_SIZE_MAX => {
                let what = Detail::clipped("members of the ring");
                Err(Refusal::Busy { what, limit: RING_SIZE_MAX as u64 })
            }
            _ => Ok(()),
        }
    }

    /// Returns the error as a text: the epoch cannot be that of the member's last ring.
    fn check_epoch(&self, connection: u64, join: &RingJoin) -> Result<(), String> {
        let ring = self.ring.as_ref().filter(|ring| ring.seat(connection).is_some());
        match ring {
            Some(ring) if join.epoch > ring.epoch() => {
                Err(format!("the member's last ring was {}, not {}", ring.epoch(), join.epoch))
            }
            _ if join.epoch > EPOCH_MAX.max(self.newest_epoch) => {
                Err(format!("epoch {} is above the limit of {EPOCH_MAX}", join.epoch))
            }
            _ => Ok(()),
        }
    }

    /// Checks that a size is possible, and that of all others: of new members the size of the
    /// first ring, of those that another rendezvous had, the size of that ring.
    fn check_size(&self, join: &RingJoin, identity: &Identity) -> Result<(), Refusal> {
        let size = join.size;
        if size == 0 || size as usize > RING_SIZE_MAX {
            let allowed = format!("1 to {RING_SIZE_MAX}");
            return Err(self.difference("size", &allowed, &size.to_string(), identity));
        }
        let known = match join.epoch {
            0 => self.first_size,
            _ if self.ring.is_some() => None,
            epoch => {
                let mut others = self.waiting.iter().map(|(_, other)| &other.join);
                let other = others.find(|other| other.epoch == epoch && other.id != join.id);
                other.map(|other| other.size)
            }
        };
        match known {
            Some(known) if known != size => {
                Err(self.difference("size", &known.to_string(), &size.to_string(), identity))
            }
            _ => Ok(()),
        }
    }

    /// Checks that an index is within the ring, and of no other member that lives.
    fn check_index(&self, join: &RingJoin) -> Result<(), Refusal> {
        let id = join.id.as_str();
        let refuse = |index: u32, detail: String| {
            let job = Text::clipped(&*self.config.job);
            Err(Refusal::UnknownTask { job, task: index, detail: Detail::shortened(detail) })
        };
        let limit = if join.epoch == 0 { join.size } else { RING_SIZE_MAX as u32 };
        if let Some(index) = join.index
            && index >= limit
        {
            let last = limit - 1;
            return refuse(index, format!("member {id:?} is outside the indices 0 to {last}"));
        }
        let own = self.places.own(Claim { id, index: join.index });
        match own.and_then(|index| Some((index, self.holder_of_index(index, id)?))) {
            Some((index, (holder, host))) => refuse(
                index,
                format!("member {id:?} on {} cannot be {holder:?} on {host}", join.host.as_str()),
            ),
            None => Ok(()),
        }
    }

    /// Checks that a peer has the facts of all others: no other value, none more and none fewer.
    /// Members that differ would find out in an operation, and end the ring for all.
    fn check_identity(&self, identity: &Identity) -> Result<(), Refusal> {
        let ours = &self.config.identity;
        // A rendezvous in no member may know fewer facts than the members.
        let all = self.config.serving.map(|_| ours).or(self.facts.as_ref());
        for facts in [Some(ours), all].into_iter().flatten() {
            facts.refusal(identity).map_or(Ok(()), Err)?;
        }
        let different = all.and_then(|all| Some((all, differing_fact(all, identity)?)));
        match different {
            Some((all, name)) => {
                let value = |of: &Identity| of.field(name).unwrap_or(ABSENT).to_owned();
                Err(self.difference(name, &value(all), &value(identity), identity))
            }
            None => Ok(()),
        }
    }

    /// Returns the refusal of a peer that differs in something beside its facts.
    fn difference(&self, field: &str, ours: &str, theirs: &str, identity: &Identity) -> Refusal {
        Refusal::Identity {
            field: Detail::clipped(field),
            server: Detail::clipped(ours),
            client: Detail::clipped(theirs),
            server_hash: self.config.identity.hash(),
            client_hash: identity.hash(),
        }
    }

    /// Returns id and host of the member that lives and has an index, if it is not this one.
    fn holder_of_index(&self, index: u32, but: &str) -> Option<(&str, &str)> {
        let waiting = self.waiting.iter().map(|(_, of)| {
            (self.places.own(of.claim()), of.join.id.as_str(), of.join.host.as_str())
        });
        let seats = self.ring.iter().flat_map(|ring| ring.live());
        let seats = seats.filter(|(connection, _)| !self.waiting.contains(*connection));
        let seats = seats.map(|(_, seat)| (Some(seat.index), seat.id.as_str(), seat.host.as_str()));
        let mut holders = waiting.chain(seats).filter(|(_, id, _)| *id != but);
        holders.find(|(own, ..)| *own == Some(index)).map(|(_, id, host)| (id, host))
    }

    /// Returns the process that has an id, or had it last.
    fn incarnation_of(&self, id: &str) -> Option<Incarnation> {
        let holder = self.holder_of_id(id).and_then(|holder| self.connections.get(holder));
        holder.map(|peer| peer.incarnation).or_else(|| self.places.incarnation(id))
    }
}

/// Returns the refusal of a process whose id another process has.
pub(super) fn fenced(older: Incarnation, newer: Incarnation) -> Refusal {
    Refusal::Fenced { epoch: ClientEpoch(older.0), current: ClientEpoch(newer.0) }
}

/// Returns the name of a fact that two sides do not have with one value.
fn differing_fact<'a>(ours: &'a Identity, theirs: &'a Identity) -> Option<&'a str> {
    let mut names = ours.fields().chain(theirs.fields()).map(|(name, _)| name);
    names.find(|name| {
        !name.starts_with(Identity::MAY_DIFFER) && ours.field(name) != theirs.field(name)
    })
}

/// The value of a fact that one side does not have.
const ABSENT: &str = "absent";

/// The most connections: one for each member, and as many for members that are replaced or have
/// not asked for a place.
pub(super) const CONNECTIONS_MAX: usize = 2 * RING_SIZE_MAX;

/// The highest epoch that a member may name, so that there is always a higher one.
pub(super) const EPOCH_MAX: u64 = u64::MAX / 2;
