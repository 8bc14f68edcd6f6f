//! The registry of a shard's clients: epochs, incarnations and leases.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pushpull_checkpoint::ClientWindow;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::{ClientEpoch, Incarnation, TaskId};
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::refusal::Detail;
use pushpull_store::planted::{Bug, PlantedBugs};

use crate::client_entry::{
    CLIENTS_MAX, ClientEntry, ClientPresence, DurableClient, ENDED, EPOCH_LIMIT,
};
use crate::client_key::{ChangedClients, ClientKey};
use crate::push_window::PushWindow;

/// The result of admitting a client.
#[derive(Debug)]
pub(crate) struct AdmittedClient {
    pub(crate) key: ClientKey,
    pub(crate) epoch: ClientEpoch,
    /// Whether an older epoch of the client has ended, so that its state must be dropped.
    pub(crate) fenced: bool,
    /// The connection that this one replaces.
    pub(crate) replaced: Option<u64>,
    /// Whether the client joins with this hello: it is new or restarted, or was no member.
    pub(crate) joins: bool,
    /// Whether its task had joined before.
    pub(crate) is_known: bool,
    /// The silence of the incarnation that it fences, if that was present and connected.
    pub(crate) displaced: Option<Duration>,
}

/// All clients that have ever said hello to a shard as a worker or a chief.
///
/// Invariants:
///
/// - Each task has one entry.
/// - The epoch of an entry never decreases, and the epochs assigned here increase.
/// - Every epoch is below [`EPOCH_LIMIT`], so that every written record can be read.
/// - No entry of a task that is forgotten is created again under an epoch of that time: the outcomes
///   of its pushes are gone, and a push that is sent again would count twice.
///
/// Only the step owner knows which epochs were assigned, and it accepts no other. Another shard
/// cannot tell a false epoch from that of a client which is new to it. So a hostile client that
/// claims a high epoch there fences the task whose name it uses, and as a chief all chiefs. This
/// ends by itself: epochs follow the time in milliseconds, such a shard accepts none that is more
/// than [`EPOCHS_AHEAD`] above the time, and a client that starts later is assigned a higher one.
///
/// The clock of a shard may be wrong. So the time is at least that of the step owner, which a shard
/// learns when it connects, and an epoch up to the newest that the shard has recorded is accepted
/// at any time.
#[derive(Debug)]
pub(crate) struct ClientRegistry {
    clients: Vec<ClientEntry>,
    by_task: HashMap<TaskId, ClientKey>,
    newest_epoch: u64,
    /// The newest epoch of a task that was forgotten.
    forgotten: u64,
    /// The tasks that keep their entries, and the clients that do.
    listed: ClusterSpec,
    kept: Vec<ClientKey>,
    /// The epoch at which this run of the server began, by its own clock or by that of the step
    /// owner, and when the run began.
    epoch_base: u64,
    started: Option<Instant>,
    /// The clients that may have changed since the last commit.
    changed: ChangedClients,
    lease: Duration,
    last_tick: Option<Instant>,
    pause: Option<Duration>,
    planted: PlantedBugs,
}

/// For how many leases the entry of a lost client is kept. It may come back after a cut of the
/// network, and continue. One that has left does not continue.
const LOST_LEASES_KEPT: u32 = 12;

/// How far above its own time, in milliseconds, a shard accepts epochs that it does not assign
/// itself: one day. Hosts whose clocks differ by more have a wrong clock.
pub(in crate::shard) const EPOCHS_AHEAD: u64 = 24 * 60 * 60 * 1000;

/// Refuses the epoch of a run that has ended, so that its client joins again. Only the step owner
/// knows that no newer run has replaced it.
fn ended(epoch: ClientEpoch, is_owner: bool) -> Refusal {
    match is_owner {
        true => Refusal::UnknownEpoch { epoch, newest: ClientEpoch(0) },
        false => {
            let what = Detail::clipped("runs of this worker that have ended");
            Refusal::Busy { what, limit: 1 }
        }
    }
}

impl ClientRegistry {
    /// Creates an empty registry. Epochs assigned here are above `epoch_base`. It must be higher
    /// than all epochs of earlier runs of the server, which other shards may have recorded.
    pub(crate) fn new(lease: Duration, epoch_base: u64, planted: PlantedBugs) -> Self {
        // No correct clock gives half of the limit. A wrong one must leave some epochs to assign.
        let epoch_base = epoch_base.min(EPOCH_LIMIT / 2);
        ClientRegistry {
            clients: Vec::new(),
            by_task: HashMap::new(),
            newest_epoch: epoch_base,
            forgotten: 0,
            listed: ClusterSpec::default(),
            kept: Vec::new(),
            epoch_base,
            started: None,
            changed: ChangedClients::default(),
            lease,
            last_tick: None,
            pause: None,
            planted,
        }
    }

    /// Keeps the entries of the tasks of this cluster for good.
    pub(crate) fn keeping(self, listed: ClusterSpec) -> Self {
        ClientRegistry { listed, ..self }
    }

    /// Keeps the entries of these clients, and no longer those of earlier ones.
    pub(crate) fn keep(&mut self, clients: Vec<ClientKey>) {
        self.kept = clients;
    }

    /// Returns the newest epoch of a task that was forgotten.
    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Restores the newest epoch of a task that an earlier process has forgotten.
    pub(crate) fn restore_forgotten(&mut self, epoch: u64) {
        self.forgotten = epoch;
    }

    /// Restores a client that an earlier process knew. Its lease starts again. Clients are restored
    /// in the order of their keys. Returns false if the task has an entry already.
    pub(crate) fn restore(&mut self, client: DurableClient, now: Instant) -> bool {
        let key = ClientKey(self.clients.len() as u32);
        self.newest_epoch = self.newest_epoch.max(client.epoch.0);
        let known = self.by_task.insert(client.task.clone(), key);
        self.clients.push(ClientEntry::restored(client, now));
        known.is_none()
    }

    /// Forgets the outcomes of all pushes, because another restore epoch begins.
    pub(crate) fn forget_pushes(&mut self) {
        for (index, client) in self.clients.iter_mut().enumerate() {
            client.window = PushWindow::new(self.planted);
            self.changed.insert(ClientKey(index as u32));
        }
    }

    /// Returns each client's push window, for a checkpoint.
    pub(crate) fn windows(&self) -> Vec<ClientWindow> {
        let window = |client: &ClientEntry| ClientWindow {
            job: client.task.job.to_string(),
            index: client.task.index,
            epoch: client.epoch.0,
            incarnation: client.incarnation.0,
            newest: client.window.newest(),
            settled: client.window.settled().map(|(at, outcome)| (at, outcome.into())).collect(),
        };
        self.clients.iter().map(window).collect()
    }

    /// Returns the keys of all clients that have ever joined.
    pub(crate) fn keys(&self) -> impl Iterator<Item = ClientKey> {
        (0..self.clients.len() as u32).map(ClientKey)
    }

    /// Describes a client, and when it was last heard from.
    pub(crate) fn describe(&self, now: Instant, key: ClientKey) -> String {
        let client = self.client(key);
        let silent = client.silent(now);
        let state = match client.presence {
            ClientPresence::Lost => "lost, heard from",
            ClientPresence::Left => "left, heard from",
            ClientPresence::Present => "heard from",
        };
        format!("{} ({state} {} ms ago)", client.task, silent.as_millis())
    }

    /// Returns the newest epoch that a client has here, or a forgotten one had; 0 without one.
    pub(crate) fn newest_recorded(&self) -> ClientEpoch {
        let newest = self.clients.iter().map(|client| client.epoch).max();
        newest.unwrap_or_default().max(ClientEpoch(self.forgotten))
    }

    /// Returns the newest epoch that this shard knows.
    pub(crate) fn newest_epoch(&self) -> u64 {
        self.newest_epoch
    }

    /// Starts this run of the server. From now on epochs follow the time.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.started = Some(now);
    }

    /// Returns the epoch of this time: the epoch base plus the milliseconds since the start.
    fn epoch_of(&self, now: Instant) -> u64 {
        let since =
            self.started.map(|started| now.saturating_duration_since(started)).unwrap_or_default();
        let since = u64::try_from(since.as_millis()).unwrap_or(EPOCH_LIMIT);
        self.epoch_base.saturating_add(since).min(EPOCH_LIMIT - 1)
    }

    /// Assigns a new epoch, which is above all others.
    pub(crate) fn mint(&mut self, now: Instant) -> Result<ClientEpoch, Refusal> {
        let next = (self.newest_epoch + 1).max(self.epoch_of(now));
        if next >= EPOCH_LIMIT {
            let what = Detail::clipped("client epochs");
            return Err(Refusal::Busy { what, limit: EPOCH_LIMIT });
        }
        self.newest_epoch = next;
        Ok(ClientEpoch(next))
    }

    /// Returns the newest epoch that the step owner can have assigned by now, on another shard.
    pub(crate) fn newest_from_owner(&self, now: Instant) -> u64 {
        let by_time = self.epoch_of(now).saturating_add(EPOCHS_AHEAD);
        by_time.max(self.newest_epoch).min(EPOCH_LIMIT - 1)
    }

    /// Returns an epoch that is at most the next one assigned here, for shards that connect to the
    /// step owner.
    pub(crate) fn owner_time(&self, now: Instant) -> ClientEpoch {
        ClientEpoch(self.newest_epoch.max(self.epoch_of(now)))
    }

    /// The step owner has said that it assigns epochs from this one on.
    pub(crate) fn learn_owner_time(&mut self, epoch: ClientEpoch, now: Instant) {
        let since = self.epoch_of(now) - self.epoch_base;
        let base = epoch.0.saturating_sub(since).min(EPOCH_LIMIT / 2);
        self.epoch_base = self.epoch_base.max(base);
    }

    /// Returns the newest epoch that a task may claim that has no entry here, or an older epoch.
    fn newest_for(&self, known: Option<ClientKey>, mint: bool, now: Instant) -> u64 {
        match (mint, known) {
            (false, _) => self.newest_from_owner(now),
            // The entry has the epoch that it was last assigned.
            (true, Some(key)) => self.client(key).epoch.0,
            // A server that has lost its state since may have assigned one.
            (true, None) => self.newest_epoch,
        }
    }

    /// Assigns no epoch up to this one, which an earlier process may have assigned.
    pub(crate) fn mint_above(&mut self, epoch: u64) {
        self.newest_epoch = self.newest_epoch.max(epoch);
    }

    /// Assigns no epoch up to this one, which another shard has recorded. The limit leaves more
    /// than can ever be assigned. Returns whether the time that other shards were told is too early.
    pub(crate) fn mint_above_recorded(&mut self, epoch: ClientEpoch, now: Instant) -> bool {
        let told = self.owner_time(now);
        self.mint_above(epoch.0.min(EPOCH_LIMIT / 2));
        self.owner_time(now) > told
    }

    /// Returns whether a client may have changed since the last commit.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Appends the clients that may have changed since the last call.
    pub(crate) fn append_changed(&mut self, all: &mut Vec<ClientKey>) {
        self.changed.append_to(all);
    }

    /// Admits a client: a new one, one that reconnects, or one that replaces an older incarnation.
    ///
    /// `mint` says whether this shard is the step owner, which assigns epochs. Other shards accept
    /// the epoch that the client was assigned.
    pub(crate) fn admit(
        &mut self,
        task: &TaskId,
        incarnation: Incarnation,
        epoch: ClientEpoch,
        mint: bool,
        connection: u64,
        now: Instant,
    ) -> Result<AdmittedClient, Refusal> {
        let known = self.find(task);
        let current = known.map(|key| self.client(key));
        let same = current.is_some_and(|client| {
            client.incarnation == incarnation || self.planted.has(Bug::NoIncarnation)
        });
        let current_epoch = current.map_or(ClientEpoch(0), |client| client.epoch);
        let has_ended = current.is_some_and(ClientEntry::has_ended);
        let newest = ClientEpoch(self.newest_for(known, mint, now));
        let epoch = match (epoch.0, same) {
            (0, true) => current_epoch,
            (0, false) if mint => self.mint(now)?,
            (1.., _) if epoch < current_epoch && self.planted.has(Bug::StaleEpoch) => epoch,
            // This run was ended while it was away, and no newer one has joined. The step owner gives
            // the entry a newer epoch, and others keep that of the run.
            _ if epoch.0 != 0
                && has_ended
                && (if mint { epoch < current_epoch } else { epoch == current_epoch }) =>
            {
                return Err(ended(epoch, mint));
            }
            _ if epoch < current_epoch || epoch.0 == 0 || (epoch == current_epoch && !same) => {
                return Err(Refusal::Fenced { epoch, current: current_epoch });
            }
            // Its pushes may have counted, so it joins again as a new client.
            _ if known.is_none() && epoch.0 <= self.forgotten => {
                return Err(ended(epoch, mint));
            }
            _ if epoch > newest => return Err(Refusal::UnknownEpoch { epoch, newest }),
            // Each epoch is assigned once.
            _ if mint && known.is_none() && self.clients.iter().any(|c| c.epoch == epoch) => {
                return Err(Refusal::UnknownEpoch { epoch, newest: ClientEpoch(0) });
            }
            _ => epoch,
        };
        let place = match known {
            None if self.clients.len() >= CLIENTS_MAX => Some(self.forgettable(now)?),
            known => known,
        };
        self.newest_epoch = self.newest_epoch.max(epoch.0);
        let fresh = ClientEntry {
            task: task.clone(),
            epoch,
            incarnation,
            presence: ClientPresence::Present,
            window: PushWindow::new(self.planted),
            reads_data: false,
            is_training: false,
            connection: Some(connection),
            heard_at: now,
            settled_at: None,
            step_time: None,
        };
        let Some(key) = place else {
            let key = ClientKey(self.clients.len() as u32);
            self.clients.push(fresh);
            self.changed.insert(key);
            self.by_task.insert(task.clone(), key);
            let fenced = false;
            let replaced = None;
            let joins = true;
            let is_known = false;
            let displaced = None;
            return Ok(AdmittedClient { key, epoch, fenced, replaced, joins, is_known, displaced });
        };
        self.changed.insert(key);
        if known.is_none() {
            self.forget(key, fresh);
            // What the forgotten task has left is dropped as that of an older incarnation is.
            let fenced = true;
            let replaced = None;
            let joins = true;
            let is_known = false;
            let displaced = None;
            return Ok(AdmittedClient { key, epoch, fenced, replaced, joins, is_known, displaced });
        }
        let client = &mut self.clients[key.0 as usize];
        let replaced = client.connection.replace(connection);
        let fenced = client.epoch != epoch;
        let is_present = client.presence == ClientPresence::Present;
        let joins = fenced || !is_present;
        // A session that joins again by itself has closed its connections.
        let is_connected = is_present && replaced.is_some();
        let displaced = (fenced && is_connected).then(|| client.silent(now));
        if fenced {
            *client = fresh;
        } else {
            client.presence = ClientPresence::Present;
            client.heard_at = now;
        }
        let is_known = true;
        Ok(AdmittedClient { key, epoch, fenced, replaced, joins, is_known, displaced })
    }

    /// Returns the entry that a new task may take: of the tasks that the cluster does not list, the
    /// one that has been gone for longest. A client that has left goes before one that is lost.
    fn forgettable(&self, now: Instant) -> Result<ClientKey, Refusal> {
        let kept = self.lease.saturating_mul(LOST_LEASES_KEPT);
        let gone = self.keys().filter(|&key| {
            let client = self.client(key);
            let is_gone = match client.presence {
                ClientPresence::Present => false,
                ClientPresence::Left => true,
                ClientPresence::Lost => client.silent(now) >= kept,
            };
            let is_kept = self.listed.contains(&client.task) || self.kept.contains(&key);
            is_gone && client.connection.is_none() && !is_kept
        });
        let longest = gone.min_by_key(|&key| {
            let client = self.client(key);
            (client.presence == ClientPresence::Lost, client.heard_at)
        });
        let what = Detail::clipped("client tasks");
        longest.ok_or(Refusal::Busy { what, limit: CLIENTS_MAX as u64 })
    }

    /// Gives the entry of a task that is gone to another.
    fn forget(&mut self, key: ClientKey, by: ClientEntry) {
        self.by_task.insert(by.task.clone(), key);
        let gone = std::mem::replace(&mut self.clients[key.0 as usize], by);
        self.by_task.remove(&gone.task);
        self.forgotten = self.forgotten.max(gone.epoch.0);
    }

    /// Retires a client's current incarnation, which is refused from now on, because its epoch is
    /// older than that of its task: with `Fenced` if another one replaces it, and otherwise with
    /// `UnknownEpoch`, so that it joins again. Returns its connection.
    pub(crate) fn retire(
        &mut self,
        key: ClientKey,
        is_replaced: bool,
        now: Instant,
    ) -> Option<u64> {
        let Ok(epoch) = self.mint(now) else { return None };
        self.changed.insert(key);
        let client = &mut self.clients[key.0 as usize];
        client.epoch = epoch;
        // No client has been assigned this epoch, and no hello matches this entry.
        client.incarnation = if is_replaced { Incarnation(!client.incarnation.0) } else { ENDED };
        client.presence = ClientPresence::Lost;
        client.window = PushWindow::new(self.planted);
        client.connection.take()
    }

    /// Ends a client's current incarnation on a shard that assigns no epochs: a hello of its epoch is
    /// refused from now on. Its push window stays. Returns its connection.
    pub(crate) fn end(&mut self, key: ClientKey) -> Option<u64> {
        let client = self.client_mut(key);
        client.incarnation = ENDED;
        client.presence = ClientPresence::Lost;
        client.connection.take()
    }

    /// Returns the clients that have this epoch.
    pub(crate) fn of_epoch(&self, epoch: ClientEpoch) -> impl Iterator<Item = ClientKey> {
        self.keys().filter(move |&key| self.client(key).epoch == epoch)
    }

    /// Returns the client of a task, if it has ever joined.
    pub(crate) fn find(&self, task: &TaskId) -> Option<ClientKey> {
        self.by_task.get(task).copied()
    }

    /// Yields the tasks that train and have never joined: of the jobs `worker` and `chief`.
    pub(crate) fn never_joined(&self, cluster: &ClusterSpec) -> impl Iterator<Item = TaskId> {
        let trains = |task: &TaskId| matches!(&*task.job, "worker" | "chief");
        let tasks = cluster.tasks().map(|(task, _)| task).filter(trains);
        // A task whose functions train has joined by them.
        let by_functions = |task: &TaskId| task.for_functions().and_then(|it| self.find(&it));
        tasks.filter(move |task| self.find(task).or_else(|| by_functions(task)).is_none())
    }

    pub(crate) fn client(&self, key: ClientKey) -> &ClientEntry {
        &self.clients[key.0 as usize]
    }

    /// Returns a client to be saved, without marking it changed.
    pub(crate) fn client_to_save(&mut self, key: ClientKey) -> &mut ClientEntry {
        &mut self.clients[key.0 as usize]
    }

    pub(crate) fn client_mut(&mut self, key: ClientKey) -> &mut ClientEntry {
        self.changed.insert(key);
        &mut self.clients[key.0 as usize]
    }

    /// Records that a client was granted a token, or that it is at its end.
    pub(crate) fn set_training(&mut self, key: ClientKey, is_training: bool) {
        self.clients[key.0 as usize].is_training = is_training;
    }

    /// Yields the members whose pushes may be under way.
    pub(crate) fn training(&self) -> impl Iterator<Item = ClientKey> {
        self.keys().filter(|&key| {
            let client = self.client(key);
            client.is_training && client.presence == ClientPresence::Present
        })
    }

    /// Returns a member other than this one that has pushed and has declared no data set. One that
    /// is not connected counts for the length of a lease.
    pub(crate) fn trains_without_data(&self, but: ClientKey, now: Instant) -> Option<&ClientEntry> {
        self.others(but, now).find(|client| !client.reads_data && client.window.newest() > 0)
    }

    /// Returns another present client that has declared the data set.
    pub(crate) fn reads_data(&self, but: ClientKey, now: Instant) -> Option<&ClientEntry> {
        self.others(but, now).find(|client| client.reads_data)
    }

    /// Yields the present clients other than one that are connected, or were within a lease.
    fn others(&self, but: ClientKey, now: Instant) -> impl Iterator<Item = &ClientEntry> {
        let others = self.keys().filter(move |&key| key != but).map(|key| self.client(key));
        others.filter(move |client| {
            let is_near = client.connection.is_some() || client.silent(now) < self.lease;
            client.presence == ClientPresence::Present && is_near
        })
    }

    /// Bytes have arrived from the client: its lease starts again.
    pub(crate) fn renew_lease(&mut self, key: ClientKey, now: Instant) {
        self.clients[key.0 as usize].heard_at = now;
    }

    /// Marks the clients lost whose lease has expired since the last call, and returns them.
    ///
    /// If this server itself was paused for more than half a lease, its clients' silence means
    /// nothing. Then all leases are extended by the pause.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<ClientKey> {
        let pause =
            self.last_tick.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        self.last_tick = Some(now);
        self.pause = (pause > self.lease / 2).then_some(pause);
        let mut lost = Vec::new();
        for (index, client) in self.clients.iter_mut().enumerate() {
            if client.presence != ClientPresence::Present {
                continue;
            }
            if let Some(pause) = self.pause {
                // Bytes that arrived since the pause do not count as received in the future.
                client.heard_at = (client.heard_at + pause).min(now);
            } else if now.saturating_duration_since(client.heard_at) >= self.lease {
                client.presence = ClientPresence::Lost;
                self.changed.insert(ClientKey(index as u32));
                lost.push(ClientKey(index as u32));
            }
        }
        lost
    }

    /// Returns how long this server had been paused at the last call of `expire`, if it was.
    pub(crate) fn paused(&self) -> Option<Duration> {
        self.pause
    }

    /// Returns how many clients have ever joined, and how many are present.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let present = self.clients.iter().filter(|c| c.presence == ClientPresence::Present).count();
        (self.clients.len(), present)
    }
}

#[cfg(test)]
mod tests;
