//! What a shard and its clients are in the words of the control file: pure, in both directions.
//!
//! What is read has been verified against its checksums, but is believed no further than that: a
//! number that no shard can have reached is refused here, so that nothing behind this file adds one
//! to the last number there is.
//!
//! What a shard can write it can read: each bound here is one that the running shard keeps.
//!
//! | what | bound | kept by |
//! | --- | --- | --- |
//! | versions, gradients, steps, tokens, generations, lives, gradients made | `COUNT_LIMIT` | each goes up by one at a time; a checkpoint's are below `RESTORED_LIMIT`, see `checkpoints` |
//! | the epoch of a client, the newest, the chief's | `EPOCH_LIMIT` | [`Replicas::admit`](super::replicas::Replicas::admit): what is minted and what is taken |
//! | restore epochs | `u32` | `initialize` and `restore` refuse the last |
//! | clients | `CLIENTS_MAX` | [`Replicas::admit`](super::replicas::Replicas::admit) |
//! | rooms | `INBOX_PUSHES_MAX` | `PsConfig::check` |
//! | tokens of a client | `TOKENS_PER_CLIENT_MAX` | `token_request`; who holds one gets no other with an answer |
//! | the name of a job | `JOB_BYTES_MAX` | the type of the field in `Hello` |
//! | the window of a client | one entry for each sequence of it | [`Window::settle`]: a sequence is never 0, see `place` and [`Window::state`] |
//! | admitted pushes | tokens from 1, each once; factors above 0, up to 1 | `StepCoordinator::ask` numbers tokens; `clipping::factor` |

use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, TaskId, TokenId};
use pushpull_common::protocol::limits::{JOB_BYTES_MAX, TOKENS_PER_CLIENT_MAX};

use super::replicas::{CLIENTS_MAX, Client, ClientKey, EPOCH_LIMIT, Presence, Remembered};
use crate::aggregate::bounded_staleness::Progress;
use crate::aggregate::clipping::Exact;
use crate::aggregate::step_coordinator::Admitted;
use crate::aggregate::step_owner::{Issued, Steps};
use crate::commit::{Address, CELL_WORDS, FIRST_WORDS, offset_of};
use crate::config::PsConfig;
use crate::dedupe::Window;
use crate::layout::Fault;
use crate::planted::PlantedBugs;

/// How far the variables of a shard are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Nobody has declared any.
    #[default]
    Absent,
    /// They have their places and may be assigned.
    Declared,
    /// They have their first values.
    Ready,
}

/// The shard's own words, in the first cell of the control file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShardRecord {
    /// Pushes applied, of every kind.
    pub(crate) version: u64,
    /// Gradients applied.
    pub(crate) gradients: u64,
    /// What the step owner counts; zeros on other shards.
    pub(crate) steps: Steps,
    /// The newest client epoch known.
    pub(crate) newest_epoch: u64,
    /// That of the newest chief.
    pub(crate) chief: ClientEpoch,
    /// Which client that is, if it is known.
    pub(crate) chief_client: Option<ClientKey>,
    pub(crate) stage: Stage,
    /// Counts the declarations of variables.
    pub(crate) generation: u64,
    /// Of the catalogue that is declared.
    pub(crate) digest: [u8; 32],
    /// How many clients have a cell each behind this one.
    pub(crate) clients: usize,
    /// The rooms of the inbox.
    pub(crate) push_slots: usize,
    /// How many processes have opened the arena.
    pub(crate) lives: u64,
    /// The bytes of a block.
    pub(crate) block_bytes: usize,
    /// Spare blocks that may be pinned.
    pub(crate) pinned: usize,
    /// The slots of the optimizer.
    pub(crate) slots: usize,
    /// Whether the tables hold checksums of blocks and bodies.
    pub(crate) integrity: bool,
    /// Goes up with each restore, and when variables first have values; and the step it began at.
    pub(crate) restore_epoch: RestoreEpoch,
    pub(crate) restored_step: GlobalStep,
    /// Steps that this shard has applied, in synchronous mode.
    pub(crate) applied: u64,
    /// On the step owner: gradients that the synchronous step under way takes, and whether the last
    /// one is committed and not applied everywhere.
    pub(crate) goal: u32,
    pub(crate) applying: bool,
    /// Whether these are the words of a durable image: what its rooms held may have been replaced
    /// since. The first commit after it says no.
    pub(crate) from_image: bool,
}

/// The word that says that the words are those of a durable image.
pub(crate) const FROM_IMAGE: usize = Word::FromImage as usize;

/// The places of the shard's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
enum Word {
    Version,
    Gradients,
    Step,
    NextToken,
    NewestEpoch,
    Finished,
    Stage,
    Generation,
    /// Four words.
    Digest,
    Clients = 12,
    PushSlots,
    Lives,
    BlockBytes,
    Pinned,
    Slots,
    Integrity,
    RestoreEpoch,
    RestoredStep,
    FromImage,
    Applied,
    Goal,
    Applying,
    Chief,
    ChiefClient,
    /// How many of them there are.
    Count,
}

/// What counts something stays below this for longer than any machine runs, and leaves room for
/// what is added to it and packed beside it.
const COUNT_LIMIT: u64 = 1 << 56;

/// What a checkpoint says was counted stays below this: what is counted on from it has its place
/// below [`COUNT_LIMIT`], too, so that the arena can be opened again.
pub(crate) const RESTORED_LIMIT: u64 = COUNT_LIMIT / 2;

const _: () = assert!(ShardRecord::WORDS <= FIRST_WORDS);

impl ShardRecord {
    /// How many words a record has.
    pub(crate) const WORDS: usize = Word::Count as usize;

    /// The record as words.
    pub(crate) fn encode(&self) -> [u64; ShardRecord::WORDS] {
        let mut words = [0; ShardRecord::WORDS];
        let mut set = |at: Word, value: u64| words[at as usize] = value;
        set(Word::Version, self.version);
        set(Word::Gradients, self.gradients);
        set(Word::Step, self.steps.step);
        set(Word::NextToken, self.steps.next_token);
        set(Word::NewestEpoch, self.newest_epoch);
        set(Word::Finished, self.steps.finished.into());
        set(Word::Stage, self.stage as u64);
        set(Word::Generation, self.generation);
        set(Word::Clients, self.clients as u64);
        set(Word::PushSlots, self.push_slots as u64);
        set(Word::Lives, self.lives);
        set(Word::BlockBytes, self.block_bytes as u64);
        set(Word::Pinned, self.pinned as u64);
        set(Word::Slots, self.slots as u64);
        set(Word::Integrity, self.integrity.into());
        set(Word::RestoreEpoch, self.restore_epoch.0.into());
        set(Word::RestoredStep, self.restored_step.0);
        set(Word::FromImage, self.from_image.into());
        set(Word::Applied, self.applied);
        set(Word::Goal, self.goal.into());
        set(Word::Applying, self.applying.into());
        set(Word::Chief, self.chief.0);
        set(Word::ChiefClient, self.chief_client.map_or(0, |key| u64::from(key.0) + 1));
        for (index, bytes) in self.digest.chunks_exact(8).enumerate() {
            let bytes = bytes.try_into().expect("chunks of eight");
            words[Word::Digest as usize + index] = u64::from_le_bytes(bytes);
        }
        words
    }

    /// A record from its words, of which there are [`ShardRecord::WORDS`].
    pub(crate) fn decode(words: &[u64]) -> Result<ShardRecord, Fault> {
        let load = |at: Word| words.get(at as usize).copied().unwrap_or(0);
        let below = |at: Word, limit: u64, what: &str| match load(at) {
            value if value < limit => Ok(value),
            value => Err(wrong(at as usize, format!("{what} below {limit}, not {value}"))),
        };
        let count = |at, what| below(at, COUNT_LIMIT, what);
        let flag = |at, what| Ok(below(at, 2, what)? == 1);
        let size = |at, limit: usize, what| Ok(below(at, limit as u64 + 1, what)? as usize);
        let digest = (0..4).flat_map(|i| words[Word::Digest as usize + i].to_le_bytes());
        let digest: Vec<u8> = digest.collect();
        Ok(ShardRecord {
            version: count(Word::Version, "a version")?,
            gradients: count(Word::Gradients, "a count of gradients")?,
            steps: Steps {
                step: count(Word::Step, "a step")?,
                next_token: count(Word::NextToken, "a token")?,
                finished: flag(Word::Finished, "whether training has ended")?,
            },
            // Clients bring epochs of their own, up to that limit; more are minted above them.
            newest_epoch: below(Word::NewestEpoch, EPOCH_LIMIT + COUNT_LIMIT, "an epoch")?,
            chief: ClientEpoch(below(Word::Chief, EPOCH_LIMIT + COUNT_LIMIT, "a chief's epoch")?),
            chief_client: match load(Word::ChiefClient) {
                0 => None,
                // Which of the clients there are.
                _ => {
                    let clients = load(Word::Clients).saturating_add(1);
                    let key = below(Word::ChiefClient, clients, "the number of a client")?;
                    Some(ClientKey(key as u32 - 1))
                }
            },
            stage: match below(Word::Stage, 3, "a stage of the variables")? {
                0 => Stage::Absent,
                1 => Stage::Declared,
                _ => Stage::Ready,
            },
            generation: count(Word::Generation, "a generation")?,
            digest: digest.try_into().expect("four words"),
            clients: size(Word::Clients, CLIENTS_MAX, "a count of clients")?,
            push_slots: size(Word::PushSlots, PsConfig::INBOX_PUSHES_MAX, "a count of push slots")?,
            lives: count(Word::Lives, "a count of lives")?,
            // What these can be depends on each other and on the layout: the store says.
            block_bytes: size(Word::BlockBytes, 1 << 40, "the bytes of a block")?,
            pinned: size(Word::Pinned, 1 << 40, "a count of blocks")?,
            slots: size(Word::Slots, 1 << 40, "a count of slots")?,
            integrity: flag(Word::Integrity, "whether blocks have checksums")?,
            restore_epoch: RestoreEpoch(
                below(Word::RestoreEpoch, 1 << 32, "a restore epoch")? as u32
            ),
            restored_step: GlobalStep(count(Word::RestoredStep, "a step")?),
            from_image: flag(Word::FromImage, "whether this is an image")?,
            applied: count(Word::Applied, "a count of steps")?,
            goal: below(Word::Goal, 1 << 32, "a count of gradients")? as u32,
            applying: flag(Word::Applying, "whether a step is being applied")?,
        })
    }
}

/// What is wrong with a control word.
fn wrong(index: usize, expected: String) -> Fault {
    Fault::at(offset_of(Address::Control(index)), expected)
}

// The words of a client, in a cell of its own.
const JOB: usize = 4;
const TOKENS: usize = JOB + JOB_BYTES_MAX / 8;
const WINDOW: usize = TOKENS + 1 + 3 * TOKENS_PER_CLIENT_MAX;

const PROGRESS: usize = WINDOW + Window::WORDS;

/// How many words a client has.
pub(crate) const CLIENT_WORDS: usize = PROGRESS + 1;
const _: () = assert!(CLIENT_WORDS <= CELL_WORDS);

/// The control word that a client's begin at.
pub(crate) fn first_of_client(client: usize) -> usize {
    (1 + client) * CELL_WORDS
}

/// The control word that a client's window begins at.
#[cfg(any(test, fuzzing))]
pub(crate) fn first_of_window(client: usize) -> usize {
    first_of_client(client) + WINDOW
}

/// Passes each word of a client that may have changed to `put`, with its index below [`CLIENT_WORDS`].
pub(crate) fn save_client(
    client: &mut Client,
    tokens: &[Issued],
    progress: Progress,
    mut put: impl FnMut(usize, u64),
) {
    let job = client.task.job.as_bytes();
    let presence = match client.presence {
        Presence::Present => 1,
        Presence::Left => 2,
        Presence::Lost => 3,
    };
    let index_and_length = u64::from(client.task.index) | (job.len() as u64) << 32;
    let head = [presence, client.epoch.0, client.incarnation.0, index_and_length];
    head.into_iter().enumerate().for_each(|(word, value)| put(word, value));
    let mut padded = [0; JOB_BYTES_MAX];
    padded[..job.len()].copy_from_slice(job);
    for (word, bytes) in (JOB..).zip(padded.chunks_exact(8)) {
        put(word, u64::from_le_bytes(bytes.try_into().expect("chunks of eight")));
    }
    put(TOKENS, tokens.len() as u64);
    for place in 0..TOKENS_PER_CLIENT_MAX {
        let words = tokens
            .get(place)
            .map_or([0; 3], |issued| [issued.token.0, issued.generation.into(), issued.step.0]);
        for (word, value) in (TOKENS + 1 + 3 * place..).zip(words) {
            put(word, value);
        }
    }
    client.window.save(|word, value| put(WINDOW + word, value));
    put(PROGRESS, progress.made << 1 | u64::from(progress.counts));
}

/// The client of this number, its tokens and how far it is, from its [`CLIENT_WORDS`].
pub(crate) fn decode_client(
    number: usize,
    words: &[u64],
    planted: PlantedBugs,
) -> Result<(Remembered, Vec<Issued>, Progress), Fault> {
    let fault =
        |word: usize, expected: &str| wrong(first_of_client(number) + word, expected.into());
    let presence = match words[0] {
        1 => Presence::Present,
        2 => Presence::Left,
        3 => Presence::Lost,
        _ => return Err(fault(0, "whether a client is present")),
    };
    if words[1] >= EPOCH_LIMIT {
        return Err(fault(1, "the epoch of a client"));
    }
    let job: Vec<u8> = words[JOB..TOKENS].iter().flat_map(|word| word.to_le_bytes()).collect();
    let job = job.get(..(words[3] >> 32) as usize).and_then(|job| std::str::from_utf8(job).ok());
    let job = job.ok_or_else(|| fault(3, "the name of a job"))?;
    let count = usize::try_from(words[TOKENS]).ok().filter(|&n| n <= TOKENS_PER_CLIENT_MAX);
    let count = count.ok_or_else(|| fault(TOKENS, "a count of tokens"))?;
    let tokens = words[TOKENS + 1..].chunks_exact(3).take(count).enumerate();
    let tokens = tokens.map(|(index, token)| {
        let generation = u32::try_from(token[1])
            .map_err(|_| fault(TOKENS + 2 + 3 * index, "the generation of a token"))?;
        Ok(Issued { token: TokenId(token[0]), generation, step: GlobalStep(token[2]) })
    });
    let progress = Progress { made: words[PROGRESS] >> 1, counts: words[PROGRESS] & 1 == 1 };
    if progress.made >= COUNT_LIMIT {
        return Err(fault(PROGRESS, "a count of gradients"));
    }
    let window = Window::decode(&words[WINDOW..PROGRESS], planted);
    let client = Remembered {
        task: TaskId::new(job, words[3] as u32),
        epoch: ClientEpoch(words[1]),
        incarnation: Incarnation(words[2]),
        presence,
        window: window.ok_or_else(|| fault(WINDOW, "the window of a client"))?,
    };
    Ok((client, tokens.collect::<Result<_, _>>()?, progress))
}

/// The words of what is admitted to a synchronous step, where there are so many rooms.
pub(crate) fn admitted_words(push_slots: usize) -> usize {
    3 * push_slots
}

/// What is admitted to the synchronous step under way, as words: for each push its token, its
/// replica, and what its gradient is multiplied by.
pub(crate) fn encode_admitted(
    admitted: &[Admitted],
    push_slots: usize,
) -> impl Iterator<Item = u64> {
    let pushes = admitted.iter();
    let words = pushes.flat_map(|p| [p.token, u64::from(p.holder.0) + 1, p.factor.bits()]);
    words.chain(std::iter::repeat(0)).take(admitted_words(push_slots))
}

/// The reverse, for a shard that knows so many clients; an error is the place of the wrong word.
pub(crate) fn decode_admitted(words: &[u64], clients: usize) -> Result<Vec<Admitted>, usize> {
    let mut admitted: Vec<Admitted> = Vec::new();
    for (index, word) in words.chunks_exact(3).enumerate() {
        let (token, holder, factor) = (word[0], word[1], Exact::from_bits(word[2]));
        if word == [0; 3] {
            continue;
        }
        let gap = admitted.len() < index;
        if token == 0 || gap || admitted.iter().any(|push| push.token == token) {
            return Err(3 * index);
        }
        if !(1..=clients as u64).contains(&holder) {
            return Err(3 * index + 1);
        }
        if !(factor.get() > 0.0 && factor.get() <= 1.0) {
            return Err(3 * index + 2);
        }
        admitted.push(Admitted { token, holder: ClientKey(holder as u32 - 1), factor });
    }
    Ok(admitted)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use pushpull_common::ids::Sequence;
    use pushpull_common::protocol::{Outcome, PushState};

    use super::*;
    use crate::aggregate::clipping;

    /// What goes up by one at a time, from what a checkpoint may say.
    fn count() -> impl Strategy<Value = u64> {
        prop_oneof![0..4_u64, RESTORED_LIMIT - 2..RESTORED_LIMIT + 2, 0..COUNT_LIMIT]
    }

    /// What is minted, or taken.
    fn epoch() -> impl Strategy<Value = u64> {
        prop_oneof![0..4_u64, EPOCH_LIMIT - 4..EPOCH_LIMIT, 0..EPOCH_LIMIT]
    }

    fn any_record() -> impl Strategy<Value = ShardRecord> {
        let steps = (count(), count(), any::<bool>());
        let steps =
            steps.prop_map(|(step, next_token, finished)| Steps { step, next_token, finished });
        let stage = prop_oneof![Just(Stage::Absent), Just(Stage::Declared), Just(Stage::Ready)];
        let sizes = (0..=CLIENTS_MAX, 0..=PsConfig::INBOX_PUSHES_MAX, count());
        let memory = (0..=1_usize << 40, 0..=1_usize << 40, 0..=1_usize << 40, any::<bool>());
        let restored = (any::<u32>(), count(), any::<bool>());
        let of_steps = (count(), any::<u32>(), any::<bool>());
        let counts = (count(), count(), steps, epoch(), epoch());
        let variables = (stage, count(), any::<[u8; 32]>());
        let all = (counts, variables, sizes, memory, restored, of_steps);
        all.prop_map(|(counts, variables, sizes, memory, restored, of_steps)| {
            let (version, gradients, steps, newest_epoch, chief) = counts;
            let (stage, generation, digest) = variables;
            let (clients, push_slots, lives) = sizes;
            let key = (chief % (clients as u64 + 1)).checked_sub(1);
            let chief_client = key.map(|key| ClientKey(key as u32));
            let (block_bytes, pinned, slots, integrity) = memory;
            let (restore_epoch, restored_step, from_image) = restored;
            let (applied, goal, applying) = of_steps;
            ShardRecord {
                version,
                gradients,
                steps,
                newest_epoch,
                chief: ClientEpoch(chief),
                chief_client,
                stage,
                generation,
                digest,
                clients,
                push_slots,
                lives,
                block_bytes,
                pinned,
                slots,
                integrity,
                restore_epoch: RestoreEpoch(restore_epoch),
                restored_step: GlobalStep(restored_step),
                from_image,
                applied,
                goal,
                applying,
            }
        })
    }

    fn outcome() -> impl Strategy<Value = Outcome> {
        let step = || count().prop_map(GlobalStep);
        prop_oneof![
            (count(), step(), count()).prop_map(|(version, step, staleness)| Outcome::Applied {
                version,
                step,
                staleness
            }),
            step().prop_map(|step| Outcome::Accepted { step }),
            step().prop_map(|current| Outcome::Stale { current }),
            Just(Outcome::Withdrawn {}),
            Just(Outcome::Held {}),
        ]
    }

    /// A window after pushes with any numbers, near and far.
    fn window() -> impl Strategy<Value = Window> {
        let near = prop_oneof![1..200_u64, u64::MAX - 100..=u64::MAX, any::<u64>()];
        vec((near, outcome()), 0..100).prop_map(|pushes| {
            let mut window = Window::new(PlantedBugs::default());
            for (sequence, outcome) in pushes {
                // As a shard does before it settles a push.
                if matches!(window.state(Sequence(sequence)), PushState::Unknown {}) {
                    window.settle(Sequence(sequence), outcome);
                }
            }
            window
        })
    }

    proptest! {
        #[test]
        fn every_record_that_a_shard_can_reach_is_read_as_it_was_written(record in any_record()) {
            prop_assert_eq!(ShardRecord::decode(&record.encode()), Ok(record));
        }

        #[test]
        fn every_client_that_a_shard_can_have_is_read_as_it_was_written(
            (job, index) in (".{0,64}", any::<u32>()),
            (epoch, incarnation, presence) in (epoch(), any::<u64>(), 0..3_usize),
            window in window(),
            tokens in vec((count(), any::<u32>(), count()), 0..=TOKENS_PER_CLIENT_MAX),
            (made, counts) in (count(), any::<bool>()),
        ) {
            let job = pushpull_common::protocol::wire::Text::<JOB_BYTES_MAX>::clipped(&job);
            let task = TaskId::new(job.as_str(), index);
            let presence = [Presence::Present, Presence::Left, Presence::Lost][presence];
            let (epoch, incarnation) = (ClientEpoch(epoch), Incarnation(incarnation));
            let remembered = Remembered { task: task.clone(), epoch, incarnation, presence, window };
            let settled: Vec<_> = remembered.window.settled().collect();
            let newest = remembered.window.newest();
            let tokens: Vec<Issued> = tokens
                .into_iter()
                .map(|(token, generation, step)| {
                    Issued { token: TokenId(token), generation, step: GlobalStep(step) }
                })
                .collect();
            let progress = Progress { made, counts };
            let mut client = Client::remembered(remembered, std::time::Instant::now());
            let mut words = vec![0; CLIENT_WORDS];
            save_client(&mut client, &tokens, progress, |word, value| words[word] = value);
            let read = decode_client(0, &words, PlantedBugs::default());
            prop_assert!(read.is_ok(), "{:?}", read.err());
            let (found, found_tokens, found_progress) = read.unwrap();
            prop_assert_eq!(found.task, task);
            prop_assert_eq!((found.epoch, found.incarnation), (epoch, incarnation));
            prop_assert_eq!((found.presence, found.window.newest()), (presence, newest));
            prop_assert_eq!(found.window.settled().collect::<Vec<_>>(), settled);
            prop_assert_eq!((found_tokens, found_progress), (tokens, progress));
        }

        #[test]
        fn whatever_is_admitted_is_read_as_it_was_written(
            pushes in vec((0..9_u32, any::<f64>(), any::<f64>()), 0..9),
            bound in prop_oneof![Just(f64::MIN_POSITIVE), Just(f64::MAX), 1e-9..1e9],
        ) {
            let admitted: Vec<Admitted> = (1..)
                .zip(pushes)
                .map(|(token, (holder, a, b))| {
                    // Other shards say any norms, but for negative ones, which are not taken.
                    let squares = [a, b].map(|it| if it < 0.0 { -it } else { it }).map(Exact::from);
                    let factor = clipping::factor(bound.into(), squares.into_iter());
                    Admitted { token, holder: ClientKey(holder), factor }
                })
                .collect();
            let words: Vec<u64> = encode_admitted(&admitted, 9).collect();
            prop_assert_eq!(decode_admitted(&words, 9), Ok(admitted));
        }
    }

    #[test]
    fn a_shard_reads_as_it_was_written() {
        let steps = Steps { step: 3, next_token: 4, finished: true };
        let record = ShardRecord {
            version: 1,
            gradients: 2,
            steps,
            newest_epoch: 5,
            chief: ClientEpoch(17),
            chief_client: Some(ClientKey(6)),
            stage: Stage::Ready,
            generation: 6,
            digest: std::array::from_fn(|i| i as u8),
            clients: 7,
            push_slots: 8,
            lives: 9,
            block_bytes: 10,
            pinned: 11,
            slots: 12,
            integrity: true,
            restore_epoch: RestoreEpoch(13),
            restored_step: GlobalStep(14),
            from_image: true,
            applied: 15,
            goal: 16,
            applying: true,
        };
        let words = record.encode();
        assert_eq!(ShardRecord::decode(&words), Ok(record));
        let empty = ShardRecord::default();
        assert_eq!(ShardRecord::decode(&empty.encode()), Ok(empty));
    }

    #[test]
    fn what_is_admitted_reads_as_it_was_written() {
        let push = |token, holder, factor: f64| {
            let (holder, factor) = (ClientKey(holder), factor.into());
            Admitted { token, holder, factor }
        };
        let admitted = vec![push(7, 1, 1.0), push(3, 0, 0.5)];
        let words: Vec<u64> = encode_admitted(&admitted, 3).collect();
        let (one, half) = (1.0_f64.to_bits(), 0.5_f64.to_bits());
        assert_eq!(words, [7, 2, one, 3, 1, half, 0, 0, 0]);
        assert_eq!(decode_admitted(&words, 2), Ok(admitted));
        let beyond = 1.5_f64.to_bits();
        for (words, wrong) in [
            ([0, 0, 0, 3, 1, one], 3),
            ([3, 1, one, 3, 2, one], 3),
            ([3, 3, one, 0, 0, 0], 1),
            ([3, 0, one, 0, 0, 0], 1),
            ([3, 1, 0, 0, 0, 0], 2),
            ([3, 1, beyond, 0, 0, 0], 2),
            ([3, 1, f64::NAN.to_bits(), 0, 0, 0], 2),
        ] {
            assert_eq!(decode_admitted(&words, 2), Err(wrong), "{words:?}");
        }
    }

    #[test]
    fn words_are_where_the_document_says() {
        assert_eq!((JOB, TOKENS, WINDOW, PROGRESS, CLIENT_WORDS), (4, 12, 61, 318, 319));
        assert_eq!((Word::Digest as usize, Word::Clients as usize), (8, 12));
        assert_eq!((Word::RestoredStep as usize, FIRST_WORDS), (20, 509));
        assert_eq!((offset_of(Address::Control(510)), first_of_client(0)), (8176, 511));
    }

    #[test]
    fn numbers_that_no_shard_reaches_are_refused_by_their_place() {
        let digest = Word::Digest as usize..Word::Clients as usize;
        for word in (0..ShardRecord::WORDS).filter(|word| !digest.contains(word)) {
            let mut words = ShardRecord::default().encode();
            words[word] = u64::MAX;
            let fault = ShardRecord::decode(&words).unwrap_err();
            assert_eq!(fault.offset as usize, crate::layout::PAGE_BYTES + 8 * word, "{fault:?}");
        }
    }
}
