//! The state that a shard must keep across a crash, read out of its tables.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::ShardId;
use pushpull_store::arena::{ArenaStorage, Budget};
use pushpull_store::planted::PlantedBugs;
use pushpull_store::table::Table;
use pushpull_store::testing::test_files::{Content, TestFiles};

use super::peers::identity;
use super::world::LIFE;
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::error::StorageError;
use crate::metrics::Counters;
use crate::push_window::PushWindow;
use crate::shard::opening::shard_setup::ShardSetup;
use crate::shard::{Shard, VariablesState};

/// The files of a shard, by name.
pub(super) type FileCopies = BTreeMap<String, Content>;

/// Everything that a crash must leave intact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PersistentState {
    /// Steps, versions, clients, push windows, tokens, and whole pushes.
    pub(super) tables: Tables,
    /// The values, then each optimizer slot.
    pub(super) values: Vec<Vec<u8>>,
    /// The rows of each table that grows.
    pub(super) rows: Vec<BTreeMap<u64, Vec<u8>>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tables {
    epoch: u32,
    restored_step: u64,
    version: u64,
    gradients: u64,
    step: u64,
    next_token: u64,
    finished: bool,
    newest_epoch: u64,
    /// The newest epoch of closed coordinators, and the open ones.
    coordinators: String,
    clients: Vec<DurableClientState>,
    /// 0 for no variables, 1 for declared, 2 for ready.
    variables: u8,
    pub(super) generation: u64,
    digest: Option<[u8; 32]>,
    assigned: Vec<u32>,
    /// The whole pushes, and their bodies.
    whole: Vec<(String, Vec<u8>)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct DurableClientState {
    name: String,
    window: Vec<u64>,
    tokens: Vec<String>,
}

impl PersistentState {
    /// Reads the state that a shard must have if it continues from here.
    pub(super) fn of(shard: &Shard) -> PersistentState {
        let steps = shard.steps.owner.as_ref().map(|owner| owner.steps()).unwrap_or_default();
        let (variables, store) = match &shard.variables.state {
            VariablesState::Absent => (0, None),
            VariablesState::Declared(store) => (1, Some(store)),
            VariablesState::Ready(store) => (2, Some(store)),
        };
        let mut values = store.map_or_else(Vec::new, |store| store.contents());
        let mut assigned = Vec::new();
        if let VariablesState::Declared(store) = &shard.variables.state {
            // Values that have not been assigned yet mean nothing.
            values.truncate(1);
            for partition in store.layout().partitions() {
                match shard.variables.assigned.contains(&partition.id) {
                    true => assigned.push(partition.id.0),
                    false => {
                        values[0][partition.offset as usize..partition.end() as usize].fill(0);
                    }
                }
            }
        }
        let clients = (0..shard.peers.registry.counts().0 as u32)
            .map(|key| shard.client_state(ClientKey(key)));
        let tables = Tables {
            epoch: shard.variables.epoch.0,
            restored_step: shard.variables.restored_step.0,
            version: shard.variables.version,
            gradients: shard.variables.gradients,
            step: steps.step,
            next_token: steps.next_token.max(1),
            finished: steps.finished,
            newest_epoch: shard.peers.registry.newest_epoch(),
            coordinators: format!(
                "{} {:?}",
                shard.steps.coordinators.closed(),
                shard.steps.coordinators.entries().collect::<Vec<_>>()
            ),
            clients: clients.collect(),
            variables,
            generation: shard.files.generation,
            digest: store.map(|store| store.catalogue().digest()),
            assigned,
            whole: shard.intake.inbox.as_ref().map_or_else(Vec::new, |inbox| inbox.whole_pushes()),
        };
        let of = |table: &Table| table.contents(&shard.files.journal);
        let rows = store.map_or_else(Vec::new, |store| store.tables().iter().map(of).collect());
        PersistentState { tables, values, rows }
    }

    /// Returns this state without variables, as it is between two declarations.
    pub(super) fn undeclared(&self) -> PersistentState {
        let mut tables = self.tables.clone();
        tables.variables = 0;
        tables.digest = None;
        tables.assigned = Vec::new();
        tables.whole = Vec::new();
        PersistentState { tables, values: Vec::new(), rows: Vec::new() }
    }
}

impl Shard {
    fn client_state(&self, key: ClientKey) -> DurableClientState {
        let client = self.peers.registry.client(key);
        // Decodes the window as recovery does: outcomes that have left it are of no use.
        let window: Vec<u64> = client.window.words();
        let window = PushWindow::decode(&window, PlantedBugs::default()).expect("a window");
        let task = &client.task;
        let epoch = client.epoch;
        let name = format!("{task} {epoch:?} {:?} {:?}", client.incarnation, client.presence);
        let tokens = self.steps.owner.iter().flat_map(|owner| owner.ledger().of(key));
        let tokens = tokens.map(|token| format!("{token:?}")).collect();
        DurableClientState { name, window: window.words(), tokens }
    }
}

/// Opens a shard on these test files.
pub(super) fn open_on(
    test_files: &TestFiles,
    config: &Arc<PsConfig>,
    now: Instant,
) -> Result<Shard, StorageError> {
    open_at(ArenaStorage::TestFiles(test_files.clone()), config, now)
}

/// Opens a shard at this place.
pub(super) fn open_at(
    storage: ArenaStorage,
    config: &Arc<PsConfig>,
    now: Instant,
) -> Result<Shard, StorageError> {
    let parts = ShardSetup {
        id: ShardId { task: 0, shard: 0 },
        config: config.clone(),
        identity: Arc::new(identity()),
        budget: Budget::new(config.storage.bytes_max.unwrap_or(crate::config::Storage::BYTES_MAX)),
        counters: Arc::new(Counters::default()),
    };
    Shard::open(parts, storage, LIFE, now)
}
