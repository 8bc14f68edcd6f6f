//! The words of the data position: the declared data set, and which of its batches are free.

use pushpull_common::data_set::{DataSet, UNSPENT_BATCHES_MAX};
use pushpull_store::commit::{Address, CELL_WORDS, Journal};
use pushpull_store::layout::Fault;
use pushpull_store::planted::PlantedBugs;

use super::record::wrong;
use crate::aggregate::data_position::{DataBatch, DataPosition};

/// The durable data position of the step owner, in cells of its own behind the shard's words.
///
/// A transaction that changes very many clients is committed in several. The first then names
/// every batch as free that a changed client has lost or holds, so that none is lost in between. A
/// token that is found to hold a batch has it, whether or not the batch is named as free.
#[derive(Debug)]
pub(crate) struct DataRecord;

// Offsets in the words of the position.
const FLAGS: usize = 0;
const SAMPLES: usize = 1;
const BATCH: usize = 2;
const SEED: usize = 3;
const EPOCHS: usize = 4;
const NEXT: usize = 5;
const FREE_COUNT: usize = 6;
const NAME: usize = 7;
const FREE: usize = NAME + DataSet::NAME_BYTES_MAX / 8;

// The bits of the flags. The length of the name is above them.
const HAS_SEED: u64 = 1;
const HAS_EPOCHS: u64 = 2;
const DROPS_REMAINDER: u64 = 4;
const NAME_SHIFT: u32 = 8;

const _: () = assert!(DataRecord::WORDS <= DataRecord::CELLS * CELL_WORDS);

impl DataRecord {
    /// The number of words. A name of length 0 means that no data set is declared.
    pub(crate) const WORDS: usize = FREE + UNSPENT_BATCHES_MAX;
    /// The number of cells, between that of the shard and those of the clients.
    pub(crate) const CELLS: usize = 4;

    /// The index of the first control word.
    const FIRST: usize = CELL_WORDS;

    /// Passes the words of a position with these free batches to `put`, with their indices below
    /// [`DataRecord::WORDS`]. Words behind the last free batch have no meaning.
    pub(crate) fn save(
        data: Option<&DataPosition>,
        free: impl ExactSizeIterator<Item = DataBatch>,
        mut put: impl FnMut(Address, u64),
    ) {
        let mut put = |word: usize, value| put(Address::Control(DataRecord::FIRST + word), value);
        let Some(data) = data else { return put(FLAGS, 0) };
        let set = data.set();
        let flag = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
        let flags = flag(set.seed().is_some(), HAS_SEED)
            | flag(set.epoch_limit().is_some(), HAS_EPOCHS)
            | flag(set.drops_remainder(), DROPS_REMAINDER);
        put(FLAGS, flags | (set.name().len() as u64) << NAME_SHIFT);
        put(SAMPLES, set.samples());
        put(BATCH, set.batch().into());
        put(SEED, set.seed().unwrap_or(0));
        put(EPOCHS, set.epoch_limit().unwrap_or(0));
        put(NEXT, data.next().0);
        put(FREE_COUNT, free.len() as u64);
        let mut name = [0; DataSet::NAME_BYTES_MAX];
        name[..set.name().len()].copy_from_slice(set.name().as_bytes());
        for (word, bytes) in (NAME..).zip(name.chunks_exact(8)) {
            put(word, u64::from_le_bytes(bytes.try_into().expect("chunks of eight")));
        }
        for (word, batch) in (FREE..DataRecord::WORDS).zip(free) {
            put(word, batch.0);
        }
    }

    /// Loads the position, without the batches that tokens hold.
    pub(crate) fn load(
        journal: &Journal,
        planted: PlantedBugs,
    ) -> Result<Option<DataPosition>, Fault> {
        let load = |word| journal.load(Address::Control(DataRecord::FIRST + word));
        DataRecord::decode(load, planted)
    }

    fn decode(
        load: impl Fn(usize) -> u64,
        planted: PlantedBugs,
    ) -> Result<Option<DataPosition>, Fault> {
        let fault = |word: usize, expected: &str| wrong(DataRecord::FIRST + word, expected.into());
        let flags = load(FLAGS);
        if flags == 0 {
            return Ok(None);
        }
        let name: Vec<u8> = (NAME..FREE).flat_map(|word| load(word).to_le_bytes()).collect();
        let name = usize::try_from(flags >> NAME_SHIFT).ok().and_then(|length| name.get(..length));
        let name = name.and_then(|name| std::str::from_utf8(name).ok());
        let name = name.ok_or_else(|| fault(NAME, "the name of a data set"))?;
        let batch = u32::try_from(load(BATCH)).map_err(|_| fault(BATCH, "the size of a batch"))?;
        let optional = |bit: u64, word: usize| (flags & bit != 0).then(|| load(word));
        let seed = optional(HAS_SEED, SEED);
        let epochs = optional(HAS_EPOCHS, EPOCHS);
        let drops_remainder = flags & DROPS_REMAINDER != 0;
        let set = DataSet::of_fields(name, load(SAMPLES), batch, seed, epochs, drops_remainder);
        let set = set.map_err(|error| fault(SAMPLES, &format!("a data set; {error}")))?;
        let next = DataBatch(load(NEXT));
        if next.0 > set.all_batches() {
            return Err(fault(NEXT, "a batch of the data set"));
        }
        let count = usize::try_from(load(FREE_COUNT)).ok().filter(|&n| n <= UNSPENT_BATCHES_MAX);
        let count = count.ok_or_else(|| fault(FREE_COUNT, "a count of free batches"))?;
        let free: Vec<DataBatch> = (FREE..FREE + count).map(|word| DataBatch(load(word))).collect();
        let ascending = free.is_sorted_by(|a, b| a < b);
        if !ascending || free.last().is_some_and(|&last| last >= next) {
            return Err(fault(FREE, "free batches in ascending order, before the next"));
        }
        Ok(Some(DataPosition::restored(set, next, free, planted)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::aggregate::data_position::BatchTaker;
    use crate::client_key::ClientKey;

    fn encode(data: Option<&DataPosition>) -> Vec<u64> {
        let mut words = vec![7; DataRecord::WORDS];
        words[FLAGS] = 0;
        let free: Vec<DataBatch> = data.into_iter().flat_map(DataPosition::free).collect();
        DataRecord::save(data, free.into_iter(), |address, value| {
            let Address::Control(index) = address else { panic!("{address:?}") };
            words[index - CELL_WORDS] = value;
        });
        words
    }

    fn decode(words: &[u64]) -> Result<Option<DataPosition>, Fault> {
        DataRecord::decode(|word| words[word], PlantedBugs::default())
    }

    proptest! {
        #[test]
        fn decoding_restores_every_reachable_position(
            (samples, batch, drop) in (50..2_000_u64, 1..50_u32, any::<bool>()),
            (seed, epochs) in (any::<Option<u64>>(), proptest::option::of(1..9_u64)),
            name in "[a-zä]{1,64}",
            events in proptest::collection::vec((any::<bool>(), 0..9_usize), 0..50),
        ) {
            let set = DataSet::new(name, samples, batch).unwrap().drop_remainder(drop);
            let set = seed.into_iter().fold(set, DataSet::shuffle);
            let set = epochs.into_iter().fold(set, DataSet::epochs);
            let mut data = DataPosition::new(set, PlantedBugs::default());
            let mut held = Vec::new();
            for (takes, which) in events {
                match takes {
                    true => held.extend(data.take(BatchTaker::Client(ClientKey(0)))),
                    false if which < held.len() => data.put_back(held.swap_remove(which)),
                    false => {}
                }
            }
            let found = decode(&encode(Some(&data))).unwrap().unwrap();
            prop_assert_eq!(found.set(), data.set());
            prop_assert_eq!(found.next(), data.next());
            prop_assert!(found.free().eq(data.free()));
        }
    }

    #[test]
    fn no_data_set_is_one_word() {
        assert_eq!(encode(None)[FLAGS], 0);
        assert_eq!(decode(&encode(None)), Ok(None));
    }

    #[test]
    fn impossible_positions_are_refused_with_their_offset() {
        let set = DataSet::new("train", 10, 3).unwrap().epochs(2);
        let free = [1, 3].map(DataBatch);
        let data = DataPosition::restored(set, DataBatch(5), free, PlantedBugs::default());
        let words = encode(Some(&data));
        assert!(decode(&words).is_ok());
        for (word, value) in [
            (FLAGS, 200 << NAME_SHIFT),
            (FLAGS, 1 << (NAME_SHIFT - 1)),
            (SAMPLES, 2),
            (BATCH, 0),
            (BATCH, 1 << 32),
            (EPOCHS, 0),
            (NEXT, 9),
            (NEXT, 3),
            (FREE_COUNT, u64::MAX),
            (FREE + 1, 1),
            (FREE + 1, 5),
        ] {
            let mut words = words.clone();
            words[word] = value;
            let fault = decode(&words).expect_err(&format!("word {word} is {value}"));
            assert!(fault.offset as usize > 8 * CELL_WORDS, "{fault:?}");
        }
    }
}
