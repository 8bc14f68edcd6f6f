//! The words of a shard: its own in the control file, and the pushes admitted to a step.
//!
//! The words have been verified against their checksums, which does not make them trustworthy.
//! Decoding refuses a number that no shard can have reached, so that later code can add to every
//! number without an overflow.
//!
//! A shard can decode everything that it can encode. The running shard keeps each bound:
//!
//! | what | bound | kept by |
//! | --- | --- | --- |
//! | versions, gradients, steps, tokens, generations, lives, gradients made | `COUNT_LIMIT` | each increases by one at a time; those of a checkpoint are below `RESTORED_LIMIT`, see `checkpoints` |
//! | the epoch of a client, the newest, the newest forgotten, the chief's | `EPOCH_LIMIT` | [`ClientRegistry::admit`](crate::shard::peers::client_registry::ClientRegistry::admit): assigned and accepted epochs |
//! | restore epochs | `u32` | `initialize` and `restore` refuse the last |
//! | clients | `CLIENTS_MAX` | [`ClientRegistry::admit`](crate::shard::peers::client_registry::ClientRegistry::admit) |
//! | push slots | `INBOX_PUSHES_MAX` | `PsConfig::check` |
//! | tokens of a client | `TOKENS_PER_CLIENT_MAX` | `ClientTokenRequest::answer`; a client with a token gets no other one with an answer |
//! | the name of a job | `JOB_BYTES_MAX` | the type of the field in `Hello` |
//! | the window of a client | one entry for each of its sequences | `PushWindow::settle`: a sequence is never 0, see `find_or_begin_push` and `PushWindow::state` |
//! | ids and epochs of coordinators | `COORDINATOR_EPOCH_LIMIT` | as those of clients, see `coordinators` |
//! | the numbers of effects | `EffectWindow::NUMBER_LIMIT` | `EffectWindow::raise` and `EffectWindow::settle` |
//! | admitted pushes | tokens from 1, each once; factors above 0, up to 1 | `StepCoordinator::request` numbers tokens; `clipping::factor` |

use pushpull_common::ids::{ClientEpoch, GlobalStep, RestoreEpoch};
use pushpull_store::commit::{Address, FIRST_WORDS, offset_of};
use pushpull_store::layout::Fault;

use crate::aggregate::clipping::BitwiseF64;
use crate::aggregate::current_step::AdmittedPush;
use crate::aggregate::data_position::DataBatch;
use crate::aggregate::token_ledger::StepState;
use crate::client_entry::{CLIENTS_MAX, EPOCH_LIMIT};
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::shard::file_work::COUNT_LIMIT;

/// How far the declaration of a shard's variables has progressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ShardStage {
    /// No variables are declared.
    #[default]
    Absent,
    /// The variables are laid out, and may be assigned.
    Declared,
    /// The variables have their first values.
    Ready,
}

/// The shard's own words, in the first cell of the control file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShardRecord {
    /// The number of pushes applied, of every kind.
    pub(crate) version: u64,
    /// The number of gradients applied.
    pub(crate) gradients: u64,
    /// The counts of the step owner; zeros on other shards.
    pub(crate) steps: StepState,
    /// The newest client epoch known.
    pub(crate) newest_epoch: u64,
    /// The newest epoch of a client that was forgotten.
    pub(crate) forgotten: u64,
    /// The epoch of the newest chief.
    pub(crate) chief: ClientEpoch,
    /// The client of the newest chief, if it is known.
    pub(crate) chief_client: Option<ClientKey>,
    pub(crate) stage: ShardStage,
    /// The number of declarations of variables.
    pub(crate) generation: u64,
    /// The digest of the declared catalogue.
    pub(crate) digest: [u8; 32],
    /// The number of clients. Each has a cell behind this one.
    pub(crate) clients: usize,
    /// The number of push slots of the inbox.
    pub(crate) push_slots: usize,
    /// The number of processes that have opened the arena.
    pub(crate) lives: u64,
    /// The bytes of a block.
    pub(crate) block_bytes: usize,
    /// The number of free blocks that readers may pin.
    pub(crate) pinned: usize,
    /// The number of optimizer slots.
    pub(crate) slots: usize,
    /// Whether the tables hold checksums of blocks and bodies.
    pub(crate) integrity: bool,
    /// The restore epoch, and the step at which it began. The epoch increases with each restore,
    /// and when the variables first have values.
    pub(crate) restore_epoch: RestoreEpoch,
    pub(crate) restored_step: GlobalStep,
    /// The number of steps that this shard has applied, in synchronous mode.
    pub(crate) applied: u64,
    /// On the step owner: the number of gradients in the current synchronous step, and whether the
    /// last step is committed but not applied everywhere.
    pub(crate) goal: u32,
    pub(crate) applying: bool,
    /// Whether these are the words of a durable image. Its push slots may have been reused since.
    /// The first commit after its recovery clears this flag.
    pub(crate) from_image: bool,
}

/// The index of [`ShardRecord::from_image`].
pub(crate) const FROM_IMAGE: usize = RecordWord::FromImage as usize;

/// The indices of the shard's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
enum RecordWord {
    Version,
    Gradients,
    Step,
    NextToken,
    NewestEpoch,
    Finished,
    Stage,
    Generation,
    /// Occupies four words.
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
    PartlyApplied,
    Forgotten,
    /// The number of words.
    Count,
}

const _: () = assert!(ShardRecord::WORDS <= FIRST_WORDS);

impl ShardRecord {
    /// The number of words of a record.
    pub(crate) const WORDS: usize = RecordWord::Count as usize;

    /// Returns the record as words.
    pub(crate) fn encode(&self) -> [u64; ShardRecord::WORDS] {
        let mut words = [0; ShardRecord::WORDS];
        let mut set = |at: RecordWord, value: u64| words[at as usize] = value;
        set(RecordWord::Version, self.version);
        set(RecordWord::Gradients, self.gradients);
        set(RecordWord::Step, self.steps.step);
        set(RecordWord::NextToken, self.steps.next_token);
        set(RecordWord::NewestEpoch, self.newest_epoch);
        set(RecordWord::Finished, self.steps.finished.into());
        set(RecordWord::PartlyApplied, self.steps.partly_applied);
        set(RecordWord::Stage, self.stage as u64);
        set(RecordWord::Generation, self.generation);
        set(RecordWord::Clients, self.clients as u64);
        set(RecordWord::PushSlots, self.push_slots as u64);
        set(RecordWord::Lives, self.lives);
        set(RecordWord::BlockBytes, self.block_bytes as u64);
        set(RecordWord::Pinned, self.pinned as u64);
        set(RecordWord::Slots, self.slots as u64);
        set(RecordWord::Integrity, self.integrity.into());
        set(RecordWord::RestoreEpoch, self.restore_epoch.0.into());
        set(RecordWord::RestoredStep, self.restored_step.0);
        set(RecordWord::FromImage, self.from_image.into());
        set(RecordWord::Applied, self.applied);
        set(RecordWord::Goal, self.goal.into());
        set(RecordWord::Applying, self.applying.into());
        set(RecordWord::Forgotten, self.forgotten);
        set(RecordWord::Chief, self.chief.0);
        set(RecordWord::ChiefClient, self.chief_client.map_or(0, |key| u64::from(key.0) + 1));
        for (index, bytes) in self.digest.chunks_exact(8).enumerate() {
            let bytes = bytes.try_into().expect("chunks of eight");
            words[RecordWord::Digest as usize + index] = u64::from_le_bytes(bytes);
        }
        words
    }

    /// Decodes a record from its [`ShardRecord::WORDS`] words.
    pub(crate) fn decode(words: &[u64]) -> Result<ShardRecord, Fault> {
        let load = |at: RecordWord| words.get(at as usize).copied().unwrap_or(0);
        let below = |at: RecordWord, limit: u64, what: &str| match load(at) {
            value if value < limit => Ok(value),
            value => Err(wrong(at as usize, format!("{what} below {limit}, not {value}"))),
        };
        let count = |at, what| below(at, COUNT_LIMIT, what);
        let flag = |at, what| Ok(below(at, 2, what)? == 1);
        let size = |at, limit: usize, what| Ok(below(at, limit as u64 + 1, what)? as usize);
        let digest = (0..4).flat_map(|i| words[RecordWord::Digest as usize + i].to_le_bytes());
        let digest: Vec<u8> = digest.collect();
        Ok(ShardRecord {
            version: count(RecordWord::Version, "a version")?,
            gradients: count(RecordWord::Gradients, "a count of gradients")?,
            steps: StepState {
                step: count(RecordWord::Step, "a step")?,
                next_token: count(RecordWord::NextToken, "a token")?,
                finished: flag(RecordWord::Finished, "whether training has ended")?,
                partly_applied: count(RecordWord::PartlyApplied, "a count of gradients")?,
            },
            // Clients bring epochs of their own up to this limit, and more are assigned above them.
            newest_epoch: below(RecordWord::NewestEpoch, EPOCH_LIMIT + COUNT_LIMIT, "an epoch")?,
            forgotten: below(RecordWord::Forgotten, EPOCH_LIMIT, "the epoch of a client")?,
            chief: ClientEpoch(below(
                RecordWord::Chief,
                EPOCH_LIMIT + COUNT_LIMIT,
                "a chief's epoch",
            )?),
            chief_client: match load(RecordWord::ChiefClient) {
                0 => None,
                // The key of one of the clients.
                _ => {
                    let clients = load(RecordWord::Clients).saturating_add(1);
                    let key = below(RecordWord::ChiefClient, clients, "the number of a client")?;
                    Some(ClientKey(key as u32 - 1))
                }
            },
            stage: match below(RecordWord::Stage, 3, "a stage of the variables")? {
                0 => ShardStage::Absent,
                1 => ShardStage::Declared,
                _ => ShardStage::Ready,
            },
            generation: count(RecordWord::Generation, "a generation")?,
            digest: digest.try_into().expect("four words"),
            clients: size(RecordWord::Clients, CLIENTS_MAX, "a count of clients")?,
            push_slots: size(
                RecordWord::PushSlots,
                PsConfig::INBOX_PUSHES_MAX,
                "a count of push slots",
            )?,
            lives: count(RecordWord::Lives, "a count of lives")?,
            // The store checks these values, which depend on each other and on the layout.
            block_bytes: size(RecordWord::BlockBytes, 1 << 40, "the bytes of a block")?,
            pinned: size(RecordWord::Pinned, 1 << 40, "a count of blocks")?,
            slots: size(RecordWord::Slots, 1 << 40, "a count of slots")?,
            integrity: flag(RecordWord::Integrity, "whether blocks have checksums")?,
            restore_epoch: RestoreEpoch(
                below(RecordWord::RestoreEpoch, 1 << 32, "a restore epoch")? as u32,
            ),
            restored_step: GlobalStep(count(RecordWord::RestoredStep, "a step")?),
            from_image: flag(RecordWord::FromImage, "whether this is an image")?,
            applied: count(RecordWord::Applied, "a count of steps")?,
            goal: below(RecordWord::Goal, 1 << 32, "a count of gradients")? as u32,
            applying: flag(RecordWord::Applying, "whether a step is being applied")?,
        })
    }
}

/// Returns the fault of a control word.
pub(in crate::shard) fn wrong(index: usize, expected: String) -> Fault {
    Fault::at(offset_of(Address::Control(index)), expected)
}

/// Returns the number of words for the pushes admitted to a synchronous step, with `push_slots`
/// slots.
pub(crate) fn admitted_words(push_slots: usize) -> usize {
    ADMITTED_WORDS * push_slots
}

/// The words of an admitted push: token, replica, factor, and the number of its batch plus 1.
const ADMITTED_WORDS: usize = 4;

/// Encodes the pushes admitted to the current synchronous step: for each the token, the replica,
/// the factor of the gradient and its batch.
pub(crate) fn encode_admitted(
    admitted: &[AdmittedPush],
    push_slots: usize,
) -> impl Iterator<Item = u64> {
    let pushes = admitted.iter();
    let words = pushes.flat_map(|p| {
        let batch = p.batch.map_or(0, |batch| batch.0 + 1);
        [p.token, u64::from(p.holder.0) + 1, p.factor.bits(), batch]
    });
    words.chain(std::iter::repeat(0)).take(admitted_words(push_slots))
}

/// Decodes the words of [`encode_admitted`], for a shard with `clients` clients. An error is the
/// index of the wrong word.
pub(crate) fn decode_admitted(words: &[u64], clients: usize) -> Result<Vec<AdmittedPush>, usize> {
    let mut admitted: Vec<AdmittedPush> = Vec::new();
    for (index, word) in words.chunks_exact(ADMITTED_WORDS).enumerate() {
        let token = word[0];
        let holder = word[1];
        let factor = BitwiseF64::from_bits(word[2]);
        if word == [0; ADMITTED_WORDS] {
            continue;
        }
        let gap = admitted.len() < index;
        if token == 0 || gap || admitted.iter().any(|push| push.token == token) {
            return Err(ADMITTED_WORDS * index);
        }
        if !(1..=clients as u64).contains(&holder) {
            return Err(ADMITTED_WORDS * index + 1);
        }
        if !(factor.get() > 0.0 && factor.get() <= 1.0) {
            return Err(ADMITTED_WORDS * index + 2);
        }
        let holder = ClientKey(holder as u32 - 1);
        let batch = word[3].checked_sub(1).map(DataBatch);
        admitted.push(AdmittedPush { token, holder, factor, batch });
    }
    Ok(admitted)
}

#[cfg(test)]
pub(in crate::shard) mod tests {
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;

    use super::*;
    use crate::aggregate::clipping;
    use crate::shard::file_work::RESTORED_LIMIT;

    /// A count that increases by one at a time, starting from that of a checkpoint.
    pub(in crate::shard) fn count() -> impl Strategy<Value = u64> {
        prop_oneof![0..4_u64, RESTORED_LIMIT - 2..RESTORED_LIMIT + 2, 0..COUNT_LIMIT]
    }

    /// An assigned or accepted epoch.
    pub(in crate::shard) fn epoch() -> impl Strategy<Value = u64> {
        prop_oneof![0..4_u64, EPOCH_LIMIT - 4..EPOCH_LIMIT, 0..EPOCH_LIMIT]
    }

    fn any_record() -> impl Strategy<Value = ShardRecord> {
        let steps = (count(), count(), any::<bool>(), count());
        let steps = steps.prop_map(|(step, next_token, finished, partly_applied)| StepState {
            step,
            next_token,
            finished,
            partly_applied,
        });
        let stage = prop_oneof![
            Just(ShardStage::Absent),
            Just(ShardStage::Declared),
            Just(ShardStage::Ready)
        ];
        let sizes = (0..=CLIENTS_MAX, 0..=PsConfig::INBOX_PUSHES_MAX, count());
        let memory = (0..=1_usize << 40, 0..=1_usize << 40, 0..=1_usize << 40, any::<bool>());
        let restored = (any::<u32>(), count(), any::<bool>());
        let of_steps = (count(), any::<u32>(), any::<bool>());
        let counts = (count(), count(), steps, epoch(), epoch(), epoch());
        let variables = (stage, count(), any::<[u8; 32]>());
        let all = (counts, variables, sizes, memory, restored, of_steps);
        all.prop_map(|(counts, variables, sizes, memory, restored, of_steps)| {
            let (version, gradients, steps, newest_epoch, forgotten, chief) = counts;
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
                forgotten,
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

    proptest! {
        #[test]
        fn decoding_restores_every_reachable_record(record in any_record()) {
            prop_assert_eq!(ShardRecord::decode(&record.encode()), Ok(record));
        }

        #[test]
        fn decoding_restores_all_admitted_pushes(
            pushes in vec((0..9_u32, any::<f64>(), any::<f64>(), option::of(count())), 0..9),
            bound in prop_oneof![Just(f64::MIN_POSITIVE), Just(f64::MAX), 1e-9..1e9],
        ) {
            let admitted: Vec<AdmittedPush> = (1..)
                .zip(pushes)
                .map(|(token, (holder, a, b, batch))| {
                    // Other shards report any squared norm. Negative ones are rejected.
                    let squares = [a, b].map(|it| if it < 0.0 { -it } else { it }).map(BitwiseF64::from);
                    let factor = clipping::factor(bound.into(), squares.into_iter());
                    let holder = ClientKey(holder);
                    let batch = batch.map(DataBatch);
                    AdmittedPush { token, holder, factor, batch }
                })
                .collect();
            let words: Vec<u64> = encode_admitted(&admitted, 9).collect();
            prop_assert_eq!(decode_admitted(&words, 9), Ok(admitted));
        }
    }

    #[test]
    fn decoding_restores_a_record() {
        let steps = StepState { step: 3, next_token: 4, finished: true, partly_applied: 18 };
        let record = ShardRecord {
            version: 1,
            gradients: 2,
            steps,
            newest_epoch: 5,
            forgotten: 18,
            chief: ClientEpoch(17),
            chief_client: Some(ClientKey(6)),
            stage: ShardStage::Ready,
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
    fn admitted_pushes_have_their_documented_words() {
        let push = |token, holder, factor: f64, batch: Option<u64>| {
            let holder = ClientKey(holder);
            let factor = factor.into();
            let batch = batch.map(DataBatch);
            AdmittedPush { token, holder, factor, batch }
        };
        let admitted = vec![push(7, 1, 1.0, Some(4)), push(3, 0, 0.5, None)];
        let words: Vec<u64> = encode_admitted(&admitted, 3).collect();
        let one = 1.0_f64.to_bits();
        let half = 0.5_f64.to_bits();
        assert_eq!(words, [7, 2, one, 5, 3, 1, half, 0, 0, 0, 0, 0]);
        assert_eq!(decode_admitted(&words, 2), Ok(admitted));
        let beyond = 1.5_f64.to_bits();
        for (words, wrong) in [
            ([0, 0, 0, 0, 3, 1, one, 0], 4),
            ([0, 0, 0, 9, 0, 0, 0, 0], 0),
            ([3, 1, one, 0, 3, 2, one, 0], 4),
            ([3, 3, one, 0, 0, 0, 0, 0], 1),
            ([3, 0, one, 0, 0, 0, 0, 0], 1),
            ([3, 1, 0, 0, 0, 0, 0, 0], 2),
            ([3, 1, beyond, 0, 0, 0, 0, 0], 2),
            ([3, 1, f64::NAN.to_bits(), 0, 0, 0, 0, 0], 2),
        ] {
            assert_eq!(decode_admitted(&words, 2), Err(wrong), "{words:?}");
        }
    }

    #[test]
    fn words_have_their_documented_indices() {
        assert_eq!((RecordWord::Digest as usize, RecordWord::Clients as usize), (8, 12));
        assert_eq!((RecordWord::RestoredStep as usize, FIRST_WORDS), (20, 509));
    }

    #[test]
    fn unreachable_numbers_are_refused_with_their_offset() {
        let digest = RecordWord::Digest as usize..RecordWord::Clients as usize;
        for word in (0..ShardRecord::WORDS).filter(|word| !digest.contains(word)) {
            let mut words = ShardRecord::default().encode();
            words[word] = u64::MAX;
            let fault = ShardRecord::decode(&words).unwrap_err();
            assert_eq!(
                fault.offset as usize,
                pushpull_store::layout::PAGE_BYTES + 8 * word,
                "{fault:?}"
            );
        }
    }
}
