//! What a state directory holds, for people and tools: read, and never changed.
//!
//! The files are opened as a server opens them, but as copies: what a commit has left to be done is
//! done to those. A server may be running on the files meanwhile; a look that falls into a commit is
//! taken again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, Incarnation, RestoreEpoch, ShardId, TaskId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::tensor::{DType, Shape};
use thiserror::Error;

use crate::arena::{Arena, Budget, Folder, Place, file_name, is_locked};
use crate::commit::{Address, CELL_WORDS, Journal, table_bytes};
use crate::error::StorageError;
use crate::inbox::{Inbox, WholeRoom, map_words, whole_rooms};
use crate::layout::{FORMAT, Fault, Kind, PAGE_BYTES, Page};
use crate::runtime::boot;
use crate::shard::durable::{control_fields, open_catalogue, table_words};
use crate::shard::poison;
use crate::shard::power::{image_name, read_image};
use crate::shard::record::{self, CLIENT_WORDS, ShardRecord, Stage};
use crate::shard::replicas::Presence as ClientPresence;
use crate::store::{Geometry, Plan, Store, undo_rows};
use crate::zoo::Zoo;

/// Why there is nothing to inspect.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InspectError {
    /// Neither a state directory nor the folder of a shard.
    #[error(
        "cannot inspect {}: it holds neither folders shard-0, shard-1 ... nor a control file",
        path.display()
    )]
    NoState {
        /// The directory.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// What a state directory holds.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// The directory.
    pub path: PathBuf,
    /// Whether a server holds its lock.
    pub live: bool,
    /// Its shards, in order.
    pub shards: Vec<ShardInspection>,
}

impl Inspection {
    /// Whether every file is what it must be, and no shard is poisoned.
    pub fn is_sound(&self) -> bool {
        self.shards.iter().all(|shard| {
            // Once the machine was started anew, what is on the disk decides.
            let decides = shard.arena.as_ref().is_some_and(|arena| !arena.this_boot);
            let sound = shard.files.iter().all(|file| file.verdict.is_sound());
            sound && (decides || shard.poisoned.is_none())
        })
    }
}

/// The arena of one shard.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ShardInspection {
    /// Its folder.
    pub path: PathBuf,
    /// Whose it is; `None` if the first page of its control file does not say.
    pub arena: Option<ArenaIs>,
    /// Why a flush has failed, if one has: no server of that boot opens the arena again.
    pub poisoned: Option<String>,
    /// What the shard remembers; `None` if that cannot be read.
    pub state: Option<ShardState>,
    /// Its variables; empty if there are none or they cannot be read.
    pub variables: Vec<VariableIs>,
    /// The clients it knows.
    pub clients: Vec<ClientIs>,
    /// The pushes that lie whole in its inbox, in the order they came.
    pub whole: Vec<WholePushIs>,
    /// The words of a commit that was made and is not done.
    pub committed_words: Option<usize>,
    /// The rows that were kept for a change that was not committed.
    pub prepared_rows: Option<usize>,
    /// The number of the newest durable image, if the server keeps such.
    pub newest_image: Option<u64>,
    /// The files.
    pub files: Vec<FileIs>,
}

/// What the first page of the control file says.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ArenaIs {
    /// The format of the files.
    pub format: u32,
    /// The shard.
    pub shard: ShardId,
    /// Drawn when the arena was made.
    pub arena: u64,
    /// The boot of the machine that it was made or last put right under.
    pub boot: [u8; 16],
    /// Whether that is this boot.
    pub this_boot: bool,
    /// What must agree with the configuration: names and values.
    pub identity: Vec<(String, String)>,
}

/// How far the variables of a shard are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VariablesAre {
    /// Nobody has declared any.
    Absent,
    /// They have their places.
    Declared,
    /// They have their values.
    Ready,
}

/// What a shard remembers of itself.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ShardState {
    /// How far its variables are.
    pub variables: VariablesAre,
    /// Pushes applied, of every kind.
    pub version: u64,
    /// Gradients applied.
    pub gradients: u64,
    /// The global step; 0 on shards that do not own it.
    pub step: GlobalStep,
    /// Whether training has ended.
    pub finished: bool,
    /// The restore epoch, and the step that it began at.
    pub restore_epoch: RestoreEpoch,
    /// The step that the restore epoch began at.
    pub restored_step: GlobalStep,
    /// How many processes have opened the arena.
    pub lives: u64,
    /// How many declarations of variables there were.
    pub generation: u64,
    /// The bytes of a block.
    pub block_bytes: usize,
    /// The slots of each variable.
    pub slots: usize,
    /// Whether blocks and bodies have checksums.
    pub integrity: bool,
    /// The rooms of the inbox.
    pub rooms: usize,
}

/// A variable, as far as this shard holds it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct VariableIs {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Its whole shape.
    pub shape: Shape,
    /// Whether the optimizer trains it.
    pub trainable: bool,
    /// The rows that are here.
    pub partitions: Vec<std::ops::Range<u64>>,
    /// Their bytes.
    pub bytes: u64,
}

/// Where a client stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Presence {
    /// It has joined.
    Present,
    /// It has left.
    Left,
    /// Its lease ran out.
    Lost,
}

/// A client.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClientIs {
    /// Its task.
    pub task: TaskId,
    /// Its epoch.
    pub epoch: u64,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Where it stands.
    pub presence: Presence,
    /// The newest push that is settled; 0 if none is.
    pub newest: u64,
    /// How many outcomes are remembered.
    pub settled: usize,
    /// The tokens it holds.
    pub tokens: Vec<u64>,
}

/// A push that lies whole in the inbox and is not applied yet.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WholePushIs {
    /// Its room.
    pub room: u32,
    /// Whose it is; `None` if its client has started anew since.
    pub client: Option<TaskId>,
    /// Its number.
    pub sequence: u64,
    /// `gradient`, `assign` or `assign_add`.
    pub operation: &'static str,
    /// The token it spends; 0 for none.
    pub token: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// What is known of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// All that is in use is covered by checksums, and they are right.
    Sound,
    /// Its first page and its length are right; what lies behind has no checksums.
    Unchecked,
    /// Nothing names it, or it was never whole: a process was killed while it made or removed it.
    Unused,
    /// It is not there, and must be.
    Missing,
    /// It is not what it must be.
    Fault {
        /// Where.
        offset: u64,
        /// What must be there.
        expected: String,
    },
}

impl Verdict {
    /// Whether nothing is wrong.
    pub fn is_sound(&self) -> bool {
        !matches!(self, Verdict::Missing | Verdict::Fault { .. })
    }
}

/// A file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileIs {
    /// Its name.
    pub name: String,
    /// Its length; 0 if it is missing.
    pub bytes: u64,
    /// What is known of it.
    pub verdict: Verdict,
}

/// Looks into a state directory, or into the folder of one shard of it. Nothing is changed, and no
/// lock is held: a server may be running on the files.
///
/// Costs a copy of the words that are in use, and a pass over all values and slots where those have
/// checksums.
pub fn inspect(path: impl AsRef<Path>) -> Result<Inspection, InspectError> {
    let path = path.as_ref();
    let name = file_name(Kind::Control, 0);
    let (directory, folders) = match path.join(&name).exists() {
        true => (path.parent().unwrap_or(path), vec![path.to_owned()]),
        false => (path, shard_folders(path)?),
    };
    if folders.is_empty() {
        return Err(InspectError::NoState { path: path.to_owned() });
    }
    let live = is_locked(directory);
    let shards = folders.iter().map(|folder| look(folder, live)).collect::<Result<_, _>>()?;
    Ok(Inspection { path: path.to_owned(), live, shards })
}

/// The folders of the shards, by their numbers.
fn shard_folders(path: &Path) -> Result<Vec<PathBuf>, StorageError> {
    let names = Folder::look(path).names()?;
    let number = |name: &str| name.strip_prefix("shard-")?.parse::<u16>().ok();
    let folders: BTreeMap<u16, PathBuf> =
        names.iter().filter_map(|name| Some((number(name)?, path.join(name)))).collect();
    Ok(folders.into_values().collect())
}

/// How often a running server is looked at before what is wrong is believed.
const LOOKS: u32 = 20;

fn look(folder: &Path, live: bool) -> Result<ShardInspection, InspectError> {
    let place = Place::Folder(Folder::look(folder));
    for round in 1.. {
        let before = place.open(&file_name(Kind::Control, 0))?;
        let found = Look::into(&place, folder)?;
        let after = place.open(&file_name(Kind::Control, 0))?;
        let bytes = |control: &Option<_>| {
            control.as_ref().map(|control: &crate::arena::Memory| control.bytes().to_vec())
        };
        let still = bytes(&before) == bytes(&after);
        if !live || round == LOOKS || (still && found.files.iter().all(|f| f.verdict.is_sound())) {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_millis(round.into()));
    }
    unreachable!("it looks a number of times")
}

/// A look into the folder of a shard.
struct Look<'a> {
    place: &'a Place,
    found: ShardInspection,
    verdicts: BTreeMap<String, Verdict>,
}

impl Look<'_> {
    fn into(place: &Place, folder: &Path) -> Result<ShardInspection, StorageError> {
        let found = ShardInspection {
            path: folder.to_owned(),
            arena: None,
            poisoned: None,
            state: None,
            variables: Vec::new(),
            clients: Vec::new(),
            whole: Vec::new(),
            committed_words: None,
            prepared_rows: None,
            newest_image: None,
            files: Vec::new(),
        };
        let mut look = Look { place, found, verdicts: BTreeMap::new() };
        look.words();
        for name in place.names()? {
            look.verdicts.entry(name).or_insert(Verdict::Unused);
        }
        let Look { mut found, verdicts, .. } = look;
        found.files.extend(verdicts.into_iter().map(|(name, verdict)| {
            let bytes = folder.join(&name).metadata().map_or(0, |metadata| metadata.len());
            FileIs { name, bytes, verdict }
        }));
        Ok(found)
    }

    /// Notes what is wrong with a file, and goes on without it.
    fn note<T>(&mut self, result: Result<T, StorageError>) -> Option<T> {
        let error = match result {
            Ok(found) => return Some(found),
            Err(error) => error,
        };
        let (path, verdict) = match error {
            StorageError::Corrupt { path, offset, expected } => {
                (path, Verdict::Fault { offset, expected })
            }
            StorageError::Missing { path } => (path, Verdict::Missing),
            StorageError::Io { path, source, doing } => {
                let expected = format!("something to {doing}: {source}");
                (path, Verdict::Fault { offset: 0, expected })
            }
            error => {
                let path = self.place.path(&file_name(Kind::Control, 0));
                (path, Verdict::Fault { offset: 0, expected: error.to_string() })
            }
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.verdicts.insert(name, verdict);
        None
    }

    fn fault<T>(&mut self, kind: Kind, generation: u64, found: Result<T, Fault>) -> Option<T> {
        let name = file_name(kind, generation);
        let found = found.map_err(|fault| self.place.corrupt(&name, fault));
        self.note(found)
    }

    /// A file that is in use, if nothing was found wrong with it before.
    fn verified(&mut self, kind: Kind, generation: u64, verdict: Verdict) {
        self.verdicts.entry(file_name(kind, generation)).or_insert(verdict);
    }

    /// Reads control words and intent, and what they name.
    fn words(&mut self) -> Option<()> {
        let name = file_name(Kind::Control, 0);
        let missing = || StorageError::Missing { path: self.place.path(&name) };
        let control = self.place.open(&name).and_then(|control| control.ok_or_else(missing));
        let control = self.note(control)?;
        let page = self.fault(Kind::Control, 0, Page::decode(control.bytes()))?;
        let fields = self.fault(Kind::Control, 0, control_fields(&page.text))?;
        let page_is = page.check(Kind::Control, page.stamp, 0);
        self.fault(Kind::Control, 0, page_is)?;
        self.found.arena = Some(ArenaIs {
            format: FORMAT,
            shard: page.stamp.shard,
            arena: page.stamp.arena,
            boot: fields.0,
            this_boot: fields.0 == boot(),
            identity: fields.1.fields().map(|(n, v)| (n.to_owned(), v.to_owned())).collect(),
        });
        if control.len() < 2 * PAGE_BYTES {
            let short = Fault::at(control.len(), "the page of the shard; the file ends");
            return self.fault(Kind::Control, 0, Err(short));
        }
        let arena = Arena { place: self.place.clone(), stamp: page.stamp };
        self.images(&arena);
        let journal = Journal::open(&arena, control, Zoo::default());
        let mut journal = self.note(journal)?;
        self.found.committed_words = self.note(journal.intent())?;
        let cell = self.note(journal.first_cell())?;
        self.found.poisoned = self.fault(Kind::Control, 0, poison::decode(&cell))?;
        let record = self.fault(Kind::Control, 0, ShardRecord::decode(&cell))?;
        self.found.state = Some(state_of(&record));
        let tables = match record.stage {
            Stage::Absent => None,
            _ => self.note(arena.open(Kind::Tables, record.generation, None)),
        };
        let has_tables = tables.is_some();
        if let Some(tables) = tables {
            journal.use_tables(tables, record.generation);
        }
        self.note(journal.redo())?;
        self.verified(Kind::Intent, 0, Verdict::Sound);
        self.note(journal.verify_control((1 + record.clients) * CELL_WORDS))?;
        self.clients(&journal, &record)?;
        self.verified(Kind::Control, 0, Verdict::Sound);
        if record.stage != Stage::Absent {
            let bulk = self.variables(&arena, &journal, &record, has_tables);
            self.pages_of_the_rest(&arena, &record, bulk.is_some());
        }
        Some(())
    }

    /// Reads the durable images. One of two may be half written; the other holds then.
    fn images(&mut self, arena: &Arena) {
        for name in (0..2).map(image_name) {
            let Ok(Some(image)) = arena.place.open(&name) else { continue };
            if let Ok((number, _)) = read_image(image.bytes(), arena.stamp) {
                self.found.newest_image = self.found.newest_image.max(Some(number));
                self.verdicts.insert(name, Verdict::Sound);
            }
        }
    }

    fn clients(&mut self, journal: &Journal, record: &ShardRecord) -> Option<()> {
        for number in 0..record.clients {
            let first = record::first_of_client(number);
            let words: Vec<u64> = (first..first + CLIENT_WORDS)
                .map(|index| journal.load(Address::Control(index)))
                .collect();
            let client = record::decode_client(number, &words, Zoo::default());
            let (client, tokens) = self.fault(Kind::Control, 0, client)?;
            self.found.clients.push(ClientIs {
                task: client.task,
                epoch: client.epoch.0,
                incarnation: client.incarnation,
                presence: match client.presence {
                    ClientPresence::Present => Presence::Present,
                    ClientPresence::Left => Presence::Left,
                    ClientPresence::Lost => Presence::Lost,
                },
                newest: client.window.newest(),
                settled: client.window.settled().count(),
                tokens: tokens.iter().map(|issued| issued.token.0).collect(),
            });
        }
        Some(())
    }

    /// Reads the variables, the pushes and the rows, and compares what has checksums.
    fn variables(
        &mut self,
        arena: &Arena,
        journal: &Journal,
        record: &ShardRecord,
        has_tables: bool,
    ) -> Option<()> {
        let generation = record.generation;
        let catalogue = self.note(open_catalogue(arena, record))?;
        self.verified(Kind::Catalogue, generation, Verdict::Sound);
        let shard = arena.stamp.shard;
        self.found.variables = variables_of(&catalogue, shard);
        let layout = catalogue.layout(shard);
        let geometry = Geometry::of_words(&layout, record.slots, record.block_bytes, record.pinned);
        let geometry = geometry.ok_or_else(|| Fault::at(PAGE_BYTES, "blocks for its variables"));
        let geometry = self.fault(Kind::Control, 0, geometry)?;
        let undo = undo_rows(arena, generation, record.version, &geometry);
        if let Some(rows) = self.note(undo) {
            self.found.prepared_rows = rows;
            self.verified(Kind::Undo, generation, Verdict::Sound);
        }
        if !has_tables {
            return None;
        }
        let words = table_words(&geometry, &layout, record.rooms);
        self.note(journal.check_tables(generation, table_bytes(words)))?;
        self.note(journal.verify_tables(generation))?;
        let first = geometry.table_words() + map_words(&layout);
        let whole = whole_rooms(journal, &layout, first, record.rooms, record.clients);
        let whole = self.fault(Kind::Tables, generation, whole)?;
        self.whole(&whole);
        let bytes = Some(Inbox::file_bytes(&layout, record.rooms));
        if let Some(memory) = self.note(arena.open(Kind::Inbox, generation, bytes)) {
            let mut inbox = Inbox::new(memory, &layout, record.rooms, 1);
            let bodies = inbox.restore(whole, record.integrity, std::time::Instant::now());
            self.fault(Kind::Inbox, generation, bodies);
        }
        let (arena, zoo) = (arena.clone(), Zoo::default());
        let plan = Plan {
            arena,
            generation,
            catalogue: catalogue.into(),
            layout,
            geometry,
            integrity: record.integrity,
            cached_bytes_max: 0,
            power: false,
            zoo,
        };
        let loan = self.note(Budget::new(u64::MAX).take(0))?;
        let store = self.note(Store::open(plan, loan, journal, record.version))?;
        self.verified(Kind::Tables, generation, Verdict::Sound);
        if record.integrity
            && record.stage == Stage::Ready
            && let Err((kind, fault)) = store.verify(journal)
        {
            self.fault::<()>(kind, generation, Err(fault));
        }
        let covered = record.integrity && record.stage == Stage::Ready;
        let verdict = if covered { Verdict::Sound } else { Verdict::Unchecked };
        for kind in [Kind::Values, Kind::Slots, Kind::Inbox] {
            if kind != Kind::Slots || record.slots > 0 {
                self.verified(kind, generation, verdict.clone());
            }
        }
        Some(())
    }

    fn whole(&mut self, whole: &[WholeRoom]) {
        let mut whole: Vec<&WholeRoom> = whole.iter().collect();
        whole.sort_by_key(|room| room.arrival.order);
        let clients = &self.found.clients;
        let pushes = whole.into_iter().map(|room| WholePushIs {
            room: room.number,
            client: room.holder.map(|holder| clients[holder.0 as usize].task.clone()),
            sequence: room.arrival.sequence.0,
            operation: match room.arrival.operation {
                Operation::Gradient {} => "gradient",
                Operation::AssignAdd {} => "assign_add",
                _ => "assign",
            },
            token: room.arrival.token.0,
            bytes: room.arrival.bytes,
        });
        self.found.whole = pushes.collect();
    }

    /// Looks at least at the first pages of what could not be read for another file's fault.
    fn pages_of_the_rest(&mut self, arena: &Arena, record: &ShardRecord, read: bool) {
        let kinds =
            [Kind::Catalogue, Kind::Tables, Kind::Values, Kind::Slots, Kind::Inbox, Kind::Undo];
        let kinds = kinds.into_iter().filter(|&kind| kind != Kind::Slots || record.slots > 0);
        for kind in kinds.filter(|_| !read) {
            let name = file_name(kind, record.generation);
            if !self.verdicts.contains_key(&name)
                && self.note(arena.open(kind, record.generation, None)).is_some()
            {
                self.verdicts.insert(name, Verdict::Unchecked);
            }
        }
    }
}

fn state_of(record: &ShardRecord) -> ShardState {
    ShardState {
        variables: match record.stage {
            Stage::Absent => VariablesAre::Absent,
            Stage::Declared => VariablesAre::Declared,
            Stage::Ready => VariablesAre::Ready,
        },
        version: record.version,
        gradients: record.gradients,
        step: GlobalStep(record.steps.step),
        finished: record.steps.finished,
        restore_epoch: record.restore_epoch,
        restored_step: record.restored_step,
        lives: record.lives,
        generation: record.generation,
        block_bytes: record.block_bytes,
        slots: record.slots,
        integrity: record.integrity,
        rooms: record.rooms,
    }
}

/// The variables that a shard holds something of.
fn variables_of(catalogue: &Catalogue, shard: ShardId) -> Vec<VariableIs> {
    let mut variables: Vec<VariableIs> = Vec::new();
    for partition in catalogue.layout(shard).partitions() {
        let variable = catalogue.variable(partition.variable);
        match variables.last_mut().filter(|last| last.name == variable.name()) {
            Some(last) => {
                last.partitions.push(partition.rows.clone());
                last.bytes += partition.bytes;
            }
            None => variables.push(VariableIs {
                name: variable.name().to_owned(),
                dtype: partition.dtype,
                shape: variable.shape().clone(),
                trainable: partition.trainable,
                partitions: vec![partition.rows.clone()],
                bytes: partition.bytes,
            }),
        }
    }
    variables
}
