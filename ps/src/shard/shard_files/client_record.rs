//! The words of a client: its entry in the registry, its push window, its tokens and its progress.

use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, TaskId, TokenId};
use pushpull_common::protocol::limits::{JOB_BYTES_MAX, TOKENS_PER_CLIENT_MAX};
use pushpull_store::commit::{Address, CELL_WORDS, Journal};
use pushpull_store::layout::Fault;
use pushpull_store::planted::PlantedBugs;

use super::coordinator_record::CoordinatorRecord;
use super::data_record::DataRecord;
use super::record::wrong;
use crate::aggregate::bounded_staleness::ReplicaProgress;
use crate::aggregate::data_position::DataBatch;
use crate::aggregate::token_ledger::Issued;
use crate::client_entry::{ClientEntry, ClientPresence, DurableClient, EPOCH_LIMIT};
use crate::push_window::PushWindow;
use crate::shard::file_work::COUNT_LIMIT;

/// The durable state of one client, in its own cell of the control file.
#[derive(Debug)]
pub(crate) struct ClientRecord {
    pub(crate) client: DurableClient,
    pub(crate) tokens: Vec<Issued>,
    /// Its gradients, as bounded staleness counts them.
    pub(crate) progress: ReplicaProgress,
}

// Offsets in the words of a client, which has its own cell.
const JOB: usize = 4;
const TOKENS: usize = JOB + JOB_BYTES_MAX / 8;
const WINDOW: usize = TOKENS + 1 + TOKEN_WORDS * TOKENS_PER_CLIENT_MAX;
const PROGRESS: usize = WINDOW + PushWindow::WORDS;
const READS_DATA: usize = PROGRESS + 1;

/// The words of a token: number, generation, step, and the number of its batch plus 1.
const TOKEN_WORDS: usize = 4;

const _: () = assert!(ClientRecord::WORDS <= CELL_WORDS);

impl ClientRecord {
    /// The number of words of a client.
    pub(crate) const WORDS: usize = READS_DATA + 1;

    /// Returns the index of a client's first control word.
    pub(crate) fn first_word(client: usize) -> usize {
        (1 + DataRecord::CELLS + CoordinatorRecord::CELLS + client) * CELL_WORDS
    }

    /// Returns the index of the first control word of a client's push window.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn first_window_word(client: usize) -> usize {
        ClientRecord::first_word(client) + WINDOW
    }

    /// Passes each word of a client that may have changed to `put`, with its index below
    /// [`ClientRecord::WORDS`].
    pub(crate) fn save(
        client: &mut ClientEntry,
        tokens: &[Issued],
        progress: ReplicaProgress,
        mut put: impl FnMut(usize, u64),
    ) {
        let job = client.task.job.as_bytes();
        let presence = match client.presence {
            ClientPresence::Present => 1,
            ClientPresence::Left => 2,
            ClientPresence::Lost => 3,
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
        for index in 0..TOKENS_PER_CLIENT_MAX {
            let words = tokens.get(index).map_or([0; TOKEN_WORDS], |issued| {
                let batch = issued.batch.map_or(0, |batch| batch.0 + 1);
                [issued.token.0, issued.generation.into(), issued.step.0, batch]
            });
            for (word, value) in (TOKENS + 1 + TOKEN_WORDS * index..).zip(words) {
                put(word, value);
            }
        }
        client.window.save(|word, value| put(WINDOW + word, value));
        put(PROGRESS, progress.made << 1 | u64::from(progress.counts));
        put(READS_DATA, client.reads_data.into());
    }

    /// Loads the client with this number, counted from 0.
    pub(crate) fn load(
        journal: &Journal,
        number: usize,
        planted: PlantedBugs,
    ) -> Result<ClientRecord, Fault> {
        let first = ClientRecord::first_word(number);
        let words = first..first + ClientRecord::WORDS;
        let words: Vec<u64> = words.map(|index| journal.load(Address::Control(index))).collect();
        ClientRecord::decode(number, &words, planted)
    }

    /// Decodes a client from its [`ClientRecord::WORDS`] words.
    fn decode(number: usize, words: &[u64], planted: PlantedBugs) -> Result<ClientRecord, Fault> {
        let fault = |word: usize, expected: &str| {
            wrong(ClientRecord::first_word(number) + word, expected.into())
        };
        let presence = match words[0] {
            1 => ClientPresence::Present,
            2 => ClientPresence::Left,
            3 => ClientPresence::Lost,
            _ => return Err(fault(0, "whether a client is present")),
        };
        if words[1] >= EPOCH_LIMIT {
            return Err(fault(1, "the epoch of a client"));
        }
        let job: Vec<u8> = words[JOB..TOKENS].iter().flat_map(|word| word.to_le_bytes()).collect();
        let job =
            job.get(..(words[3] >> 32) as usize).and_then(|job| std::str::from_utf8(job).ok());
        let job = job.ok_or_else(|| fault(3, "the name of a job"))?;
        let count = usize::try_from(words[TOKENS]).ok().filter(|&n| n <= TOKENS_PER_CLIENT_MAX);
        let count = count.ok_or_else(|| fault(TOKENS, "a count of tokens"))?;
        let tokens = words[TOKENS + 1..].chunks_exact(TOKEN_WORDS).take(count).enumerate();
        let tokens = tokens.map(|(index, token)| {
            let generation = u32::try_from(token[1]).map_err(|_| {
                fault(TOKENS + 2 + TOKEN_WORDS * index, "the generation of a token")
            })?;
            let batch = token[3].checked_sub(1).map(DataBatch);
            Ok(Issued { token: TokenId(token[0]), generation, step: GlobalStep(token[2]), batch })
        });
        let progress =
            ReplicaProgress { made: words[PROGRESS] >> 1, counts: words[PROGRESS] & 1 == 1 };
        if progress.made >= COUNT_LIMIT {
            return Err(fault(PROGRESS, "a count of gradients"));
        }
        let window = PushWindow::decode(&words[WINDOW..PROGRESS], planted);
        let client = DurableClient {
            task: TaskId::new(job, words[3] as u32),
            epoch: ClientEpoch(words[1]),
            incarnation: Incarnation(words[2]),
            presence,
            window: window.ok_or_else(|| fault(WINDOW, "the window of a client"))?,
            reads_data: words[READS_DATA] != 0,
        };
        let tokens = tokens.collect::<Result<_, _>>()?;
        Ok(ClientRecord { client, tokens, progress })
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;
    use pushpull_common::ids::Sequence;
    use pushpull_common::protocol::{Outcome, PushState};
    use pushpull_store::commit::offset_of;

    use super::super::record::tests::{count, epoch};
    use super::*;

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
            Just(Outcome::Repeated {}),
        ]
    }

    /// A window after pushes with any sequences, close to each other and far apart.
    fn window() -> impl Strategy<Value = PushWindow> {
        let near = prop_oneof![1..200_u64, u64::MAX - 100..=u64::MAX, any::<u64>()];
        vec((near, outcome()), 0..100).prop_map(|pushes| {
            let mut window = PushWindow::new(PlantedBugs::default());
            for (sequence, outcome) in pushes {
                // A shard checks the same before it settles a push.
                if matches!(window.state(Sequence(sequence)), PushState::Unknown {}) {
                    window.settle(Sequence(sequence), outcome);
                }
            }
            window
        })
    }

    proptest! {
        #[test]
        fn decoding_restores_every_possible_client(
            (job, index) in (".{0,64}", any::<u32>()),
            (epoch, incarnation, presence) in (epoch(), any::<u64>(), 0..3_usize),
            window in window(),
            tokens in vec((count(), any::<u32>(), count(), option::of(count())), 0..=TOKENS_PER_CLIENT_MAX),
            (made, counts, reads_data) in (count(), any::<bool>(), any::<bool>()),
        ) {
            let job = pushpull_common::protocol::wire::Text::<JOB_BYTES_MAX>::clipped(&job);
            let task = TaskId::new(job.as_str(), index);
            let presence = [ClientPresence::Present, ClientPresence::Left, ClientPresence::Lost][presence];
            let epoch = ClientEpoch(epoch);
            let incarnation = Incarnation(incarnation);
            let restored = DurableClient { task: task.clone(), epoch, incarnation, presence, window, reads_data };
            let settled: Vec<_> = restored.window.settled().collect();
            let newest = restored.window.newest();
            let tokens: Vec<Issued> = tokens
                .into_iter()
                .map(|(token, generation, step, batch)| {
                    let batch = batch.map(DataBatch);
                    Issued { token: TokenId(token), generation, step: GlobalStep(step), batch }
                })
                .collect();
            let progress = ReplicaProgress { made, counts };
            let mut client = ClientEntry::restored(restored, std::time::Instant::now());
            let mut words = vec![0; ClientRecord::WORDS];
            ClientRecord::save(&mut client, &tokens, progress, |word, value| words[word] = value);
            let read = ClientRecord::decode(0, &words, PlantedBugs::default());
            prop_assert!(read.is_ok(), "{:?}", read.err());
            let ClientRecord { client: found, tokens: found_tokens, progress: found_progress } = read.unwrap();
            prop_assert_eq!(found.task, task);
            prop_assert_eq!((found.epoch, found.incarnation), (epoch, incarnation));
            prop_assert_eq!((found.presence, found.window.newest()), (presence, newest));
            prop_assert_eq!(found.window.settled().collect::<Vec<_>>(), settled);
            prop_assert_eq!((found_tokens, found_progress), (tokens, progress));
            prop_assert_eq!(found.reads_data, reads_data);
        }
    }

    #[test]
    fn words_have_their_documented_indices() {
        assert_eq!((JOB, TOKENS, WINDOW, PROGRESS, ClientRecord::WORDS), (4, 12, 77, 398, 400));
        let first = ClientRecord::first_word(0);
        assert_eq!((offset_of(Address::Control(510)), first), (8176, 8 * 511));
    }
}
