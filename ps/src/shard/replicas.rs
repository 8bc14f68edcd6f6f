//! The clients of a shard: epochs, incarnations, leases.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pushpull_common::ids::{ClientEpoch, Incarnation, TaskId};
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::refusal::Detail;

use super::changed::Changed;
use crate::checkpoint::ClientWindow;
use crate::dedupe::Window;
use crate::planted::{Bug, PlantedBugs};

/// A client's place in the shard's tables; it keeps it through all its epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClientKey(pub(crate) u32);

/// Where a client stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// It has joined, and its lease runs.
    Present,
    /// It has left.
    Left,
    /// Its lease ran out.
    Lost,
}

/// One task's client.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) task: TaskId,
    pub(crate) epoch: ClientEpoch,
    pub(crate) incarnation: Incarnation,
    pub(crate) presence: Presence,
    pub(crate) window: Window,
    pub(crate) connection: Option<u64>,
    heard: Instant,
}

/// What is kept of a client across a restart.
#[derive(Clone, Debug)]
pub(crate) struct Remembered {
    pub(crate) task: TaskId,
    pub(crate) epoch: ClientEpoch,
    pub(crate) incarnation: Incarnation,
    pub(crate) presence: Presence,
    pub(crate) window: Window,
}

impl Client {
    /// One that an earlier process knew, whose lease starts now.
    pub(crate) fn remembered(client: Remembered, now: Instant) -> Client {
        let Remembered { task, epoch, incarnation, presence, window } = client;
        Client { task, epoch, incarnation, presence, window, connection: None, heard: now }
    }
}

/// What a handshake made of a client.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) key: ClientKey,
    pub(crate) epoch: ClientEpoch,
    /// An older epoch has ended: what belongs to it is dropped.
    pub(crate) fenced: bool,
    /// The connection that this one replaces.
    pub(crate) replaced: Option<u64>,
}

/// All clients that a shard has met.
///
/// Invariants: one entry per task; an entry's epoch never falls; epochs minted here rise; every epoch is
/// below [`EPOCH_LIMIT`], so that what is written can be read.
///
/// Only the step owner knows which epochs were given out. It takes no other. A shard that gives none out
/// cannot tell a lie from a client that it has not met, so a liar that names a high epoch fences the task
/// whose name it uses there, and as a chief all chiefs. The lie ends by itself: epochs follow the time in
/// milliseconds, such a shard takes none that is more than [`EPOCHS_AHEAD`] above its own, and a client that
/// starts after that is given a higher one.
#[derive(Debug)]
pub(crate) struct Replicas {
    clients: Vec<Client>,
    by_task: HashMap<TaskId, ClientKey>,
    newest_epoch: u64,
    /// What epochs begin at in this life of the server, and when that began.
    epoch_base: u64,
    born: Option<Instant>,
    /// The clients that may have changed since the last commit.
    changed: Changed,
    lease: Duration,
    last_tick: Option<Instant>,
    pause: Option<Duration>,
    planted: PlantedBugs,
}

/// Tasks whose clients a shard remembers: an entry is kept as long as the server lives, because
/// it holds the outcomes of the client's pushes.
pub(crate) const CLIENTS_MAX: usize = 16_384;

/// Epochs are below this.
pub(super) const EPOCH_LIMIT: u64 = 1 << 63;

/// How far above its own time in milliseconds the epochs lie that a shard takes which mints none: a day. The clocks
/// of hosts that are further apart are wrong.
pub(super) const EPOCHS_AHEAD: u64 = 24 * 60 * 60 * 1000;

impl Replicas {
    /// No clients yet. Epochs minted here begin above `epoch_base`, which must be higher in each
    /// life of the server than all epochs of the lives before: other shards may remember those.
    pub(crate) fn new(lease: Duration, epoch_base: u64, planted: PlantedBugs) -> Self {
        // No clock says half of it; one that does must leave some to mint.
        let epoch_base = epoch_base.min(EPOCH_LIMIT / 2);
        Replicas {
            clients: Vec::new(),
            by_task: HashMap::new(),
            newest_epoch: epoch_base,
            epoch_base,
            born: None,
            changed: Changed::default(),
            lease,
            last_tick: None,
            pause: None,
            planted,
        }
    }

    /// Puts back a client that an earlier process knew, whose lease starts anew. Clients are put
    /// back in the order of their keys; false if its task is there already.
    pub(crate) fn restore(&mut self, client: Remembered, now: Instant) -> bool {
        let key = ClientKey(self.clients.len() as u32);
        self.newest_epoch = self.newest_epoch.max(client.epoch.0);
        let known = self.by_task.insert(client.task.clone(), key);
        self.clients.push(Client::remembered(client, now));
        known.is_none()
    }

    /// Forgets what became of every push: another restore epoch begins.
    pub(crate) fn forget_pushes(&mut self) {
        for (index, client) in self.clients.iter_mut().enumerate() {
            client.window = Window::new(self.planted);
            self.changed.insert(ClientKey(index as u32));
        }
    }

    /// What is remembered of each client's pushes, as a checkpoint has it.
    pub(crate) fn windows(&self) -> Vec<ClientWindow> {
        let window = |client: &Client| ClientWindow {
            job: client.task.job.to_string(),
            index: client.task.index,
            epoch: client.epoch.0,
            incarnation: client.incarnation.0,
            newest: client.window.newest(),
            settled: client.window.settled().map(|(at, outcome)| (at, outcome.into())).collect(),
        };
        self.clients.iter().map(window).collect()
    }

    /// All clients that have ever joined.
    pub(crate) fn keys(&self) -> impl Iterator<Item = ClientKey> {
        (0..self.clients.len() as u32).map(ClientKey)
    }

    /// When something was last heard of a client.
    pub(crate) fn last_heard(&self, key: ClientKey) -> Instant {
        self.client(key).heard
    }

    /// The newest epoch that this shard knows.
    pub(crate) fn newest_epoch(&self) -> u64 {
        self.newest_epoch
    }

    /// This life of the server begins: from now on epochs follow the time.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.born = Some(now);
    }

    /// The epoch of this time: so many milliseconds above what epochs begin at in this life.
    fn epoch_of(&self, now: Instant) -> u64 {
        let since = self.born.map(|born| now.saturating_duration_since(born)).unwrap_or_default();
        let since = u64::try_from(since.as_millis()).unwrap_or(EPOCH_LIMIT);
        self.epoch_base.saturating_add(since).min(EPOCH_LIMIT - 1)
    }

    /// A new epoch, above every one before.
    fn mint(&mut self, now: Instant) -> Result<ClientEpoch, Refusal> {
        let next = (self.newest_epoch + 1).max(self.epoch_of(now));
        if next >= EPOCH_LIMIT {
            let what = Detail::clipped("client epochs");
            return Err(Refusal::Busy { what, limit: EPOCH_LIMIT });
        }
        self.newest_epoch = next;
        Ok(ClientEpoch(next))
    }

    /// The newest epoch that a task may bring which has none here, or an older one.
    fn newest_for(&self, known: Option<ClientKey>, mint: bool, now: Instant) -> u64 {
        match (mint, known) {
            (false, _) => self.epoch_of(now).saturating_add(EPOCHS_AHEAD).min(EPOCH_LIMIT - 1),
            // What it was given last is what is known here.
            (true, Some(key)) => self.client(key).epoch.0,
            // It may have been given one by a server that has lost its state since.
            (true, None) => self.newest_epoch,
        }
    }

    /// Does not mint what an earlier process may have minted.
    pub(crate) fn mint_above(&mut self, epoch: u64) {
        self.newest_epoch = self.newest_epoch.max(epoch);
    }

    /// Puts the clients that may have changed since this was last asked behind others.
    pub(crate) fn append_changed(&mut self, all: &mut Vec<ClientKey>) {
        self.changed.append_to(all);
    }

    /// Takes a client in: anew, again after a lost connection, or in place of an older self.
    ///
    /// `mint` says whether this shard is the step owner, which gives epochs out; the others take
    /// the epoch that the client was given.
    pub(crate) fn admit(
        &mut self,
        task: &TaskId,
        incarnation: Incarnation,
        epoch: ClientEpoch,
        mint: bool,
        connection: u64,
        now: Instant,
    ) -> Result<Admitted, Refusal> {
        let known = self.find(task);
        let current = known.map(|key| self.client(key));
        let same = current.is_some_and(|client| {
            client.incarnation == incarnation || self.planted.has(Bug::NoIncarnation)
        });
        let current_epoch = current.map_or(ClientEpoch(0), |client| client.epoch);
        let newest = ClientEpoch(self.newest_for(known, mint, now));
        let epoch = match (epoch.0, same) {
            (0, true) => current_epoch,
            (0, false) if mint => self.mint(now)?,
            (1.., _) if epoch < current_epoch && self.planted.has(Bug::StaleEpoch) => epoch,
            _ if epoch < current_epoch || epoch.0 == 0 || (epoch == current_epoch && !same) => {
                return Err(Refusal::Fenced { epoch, current: current_epoch });
            }
            _ if epoch > newest => return Err(Refusal::UnknownEpoch { epoch, newest }),
            // Each is given out once.
            _ if mint && known.is_none() && self.clients.iter().any(|c| c.epoch == epoch) => {
                return Err(Refusal::UnknownEpoch { epoch, newest: ClientEpoch(0) });
            }
            _ => epoch,
        };
        self.newest_epoch = self.newest_epoch.max(epoch.0);
        let fresh = Client {
            task: task.clone(),
            epoch,
            incarnation,
            presence: Presence::Present,
            window: Window::new(self.planted),
            connection: Some(connection),
            heard: now,
        };
        let Some(key) = known else {
            if self.clients.len() >= CLIENTS_MAX {
                let what = Detail::clipped("client tasks");
                return Err(Refusal::Busy { what, limit: CLIENTS_MAX as u64 });
            }
            let key = ClientKey(self.clients.len() as u32);
            self.clients.push(fresh);
            self.changed.insert(key);
            self.by_task.insert(task.clone(), key);
            return Ok(Admitted { key, epoch, fenced: false, replaced: None });
        };
        self.changed.insert(key);
        let client = &mut self.clients[key.0 as usize];
        let replaced = client.connection.replace(connection);
        let fenced = client.epoch != epoch;
        if fenced {
            *client = fresh;
        } else {
            client.presence = Presence::Present;
            client.heard = now;
        }
        Ok(Admitted { key, epoch, fenced, replaced })
    }

    /// Ends the present self of a client, which is fenced from now on: its epoch is older than that of
    /// its task. Returns its connection.
    pub(crate) fn retire(&mut self, key: ClientKey, now: Instant) -> Option<u64> {
        let Ok(epoch) = self.mint(now) else { return None };
        self.changed.insert(key);
        let client = &mut self.clients[key.0 as usize];
        client.epoch = epoch;
        // Nobody has been given this epoch, and nobody's hello may be taken for its holder's.
        client.incarnation = Incarnation(!client.incarnation.0);
        client.presence = Presence::Lost;
        client.window = Window::new(self.planted);
        client.connection.take()
    }

    /// The clients that have this epoch.
    pub(crate) fn of_epoch(&self, epoch: ClientEpoch) -> impl Iterator<Item = ClientKey> {
        self.keys().filter(move |&key| self.client(key).epoch == epoch)
    }

    /// The client of a task, if it has ever joined.
    pub(crate) fn find(&self, task: &TaskId) -> Option<ClientKey> {
        self.by_task.get(task).copied()
    }

    pub(crate) fn client(&self, key: ClientKey) -> &Client {
        &self.clients[key.0 as usize]
    }

    /// Returns a client to be saved, without marking it changed.
    pub(crate) fn client_to_save(&mut self, key: ClientKey) -> &mut Client {
        &mut self.clients[key.0 as usize]
    }

    pub(crate) fn client_mut(&mut self, key: ClientKey) -> &mut Client {
        self.changed.insert(key);
        &mut self.clients[key.0 as usize]
    }

    /// A byte has come from the client: its lease starts anew.
    pub(crate) fn heard(&mut self, key: ClientKey, now: Instant) {
        self.clients[key.0 as usize].heard = now;
    }

    /// The clients whose lease has run out since the last call; they are lost now.
    ///
    /// If this server itself was paused for a good part of a lease, the silence says nothing about
    /// its clients: all leases are longer by the pause.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<ClientKey> {
        let pause =
            self.last_tick.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        self.last_tick = Some(now);
        self.pause = (pause > self.lease / 2).then_some(pause);
        let mut lost = Vec::new();
        for (index, client) in self.clients.iter_mut().enumerate() {
            if client.presence != Presence::Present {
                continue;
            }
            if let Some(pause) = self.pause {
                // What was heard since is not put into the future.
                client.heard = (client.heard + pause).min(now);
            } else if now.saturating_duration_since(client.heard) >= self.lease {
                client.presence = Presence::Lost;
                self.changed.insert(ClientKey(index as u32));
                lost.push(ClientKey(index as u32));
            }
        }
        lost
    }

    /// For how long this server itself had been paused at the last call of `expire`, if it was.
    pub(crate) fn paused(&self) -> Option<Duration> {
        self.pause
    }

    /// How many clients have ever joined, and how many are present.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let present = self.clients.iter().filter(|c| c.presence == Presence::Present).count();
        (self.clients.len(), present)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(5);

    fn admit(
        replicas: &mut Replicas,
        incarnation: u64,
        epoch: u64,
        now: Instant,
    ) -> Result<Admitted, Refusal> {
        let task = TaskId::worker(0);
        replicas.admit(&task, Incarnation(incarnation), ClientEpoch(epoch), true, 1, now)
    }

    #[test]
    fn a_restart_fences_and_a_reconnect_does_not() {
        let now = Instant::now();
        let mut replicas = Replicas::new(LEASE, 0, PlantedBugs::default());
        let first = admit(&mut replicas, 10, 0, now).unwrap();
        assert_eq!((first.epoch, first.fenced), (ClientEpoch(1), false));
        let again = admit(&mut replicas, 10, 1, now).unwrap();
        assert_eq!((again.epoch, again.fenced, again.replaced), (ClientEpoch(1), false, Some(1)));
        let unanswered = admit(&mut replicas, 10, 0, now).unwrap();
        assert_eq!(unanswered.epoch, ClientEpoch(1), "the welcome was lost");
        let restarted = admit(&mut replicas, 11, 0, now).unwrap();
        assert_eq!((restarted.epoch, restarted.fenced), (ClientEpoch(2), true));
        let ghost = admit(&mut replicas, 10, 1, now).unwrap_err();
        assert!(matches!(ghost, Refusal::Fenced { current: ClientEpoch(2), .. }));
        let liar = admit(&mut replicas, 12, u64::MAX, now).unwrap_err();
        let (epoch, newest) = (ClientEpoch(u64::MAX), ClientEpoch(2));
        assert_eq!(liar, Refusal::UnknownEpoch { epoch, newest });
        assert_eq!(admit(&mut replicas, 12, 0, now).unwrap().epoch, ClientEpoch(3));
    }

    #[test]
    fn a_hundred_restarts_under_one_name_are_one_client() {
        let now = Instant::now();
        let mut replicas = Replicas::new(LEASE, 0, PlantedBugs::default());
        for incarnation in 1..=100 {
            let admitted = admit(&mut replicas, incarnation, 0, now).unwrap();
            assert_eq!(admitted.epoch, ClientEpoch(incarnation));
        }
        assert_eq!(replicas.counts(), (1, 1));
    }

    #[test]
    fn silence_loses_a_client_but_our_own_pause_does_not() {
        let start = Instant::now();
        let mut replicas = Replicas::new(LEASE, 0, PlantedBugs::default());
        let key = admit(&mut replicas, 1, 0, start).unwrap().key;
        let mut now = start;
        let mut step = |replicas: &mut Replicas, millis| {
            now += Duration::from_millis(millis);
            replicas.expire(now)
        };
        assert!(step(&mut replicas, 100).is_empty());
        assert!(step(&mut replicas, 60_000).is_empty(), "this server was stopped, not the client");
        for _ in 0..48 {
            assert!(step(&mut replicas, 100).is_empty());
        }
        assert_eq!(step(&mut replicas, 100), [key]);
        assert_eq!(replicas.counts(), (1, 0));
        assert!(step(&mut replicas, 100).is_empty(), "lost once");
    }
}
