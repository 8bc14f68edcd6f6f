//! The words of the coordinators: for each its name, its id, its epoch, its effect window and
//! the digests of its effects.

use pushpull_common::effect_window::{COORDINATOR_EPOCH_LIMIT, EffectWindow};
use pushpull_common::ids::{CoordinatorEpoch, CoordinatorId, EffectNumber};
use pushpull_common::protocol::limits::{COORDINATOR_NAME_BYTES_MAX, COORDINATORS_MAX};
use pushpull_store::commit::{Address, CELL_WORDS, Journal};
use pushpull_store::layout::Fault;
use pushpull_store::planted::PlantedBugs;

use super::data_record::DataRecord;
use super::record::wrong;
use crate::coordinators::{CoordinatorEntry, Coordinators, SettledDigests};

/// The durable coordinators, in cells of their own behind the data position.
#[derive(Debug)]
pub(crate) struct CoordinatorRecord;

/// The newest epoch of a closed coordinator. The places follow it.
const CLOSED: usize = 0;
/// The newest epoch of a forgotten coordinator. It follows the places.
const FORGOTTEN: usize = 1 + PLACE_WORDS * COORDINATORS_MAX;

// Offsets in the words of a place.
const NAME_BYTES: usize = 0;
const COORDINATOR: usize = 1;
const EPOCH: usize = 2;
const SETTLED: usize = 3;
const BITS: usize = 4;
const FIRST_DIGEST: usize = 5;
const DIGEST_OF: usize = 6;
const DIGEST: usize = 7;
const AHEAD_OF: usize = 8;
const AHEAD: usize = 9;
const NAME: usize = 10;
const PLACE_WORDS: usize = NAME + COORDINATOR_NAME_BYTES_MAX / 8;

const _: () = assert!(CoordinatorRecord::WORDS <= CoordinatorRecord::CELLS * CELL_WORDS);

impl CoordinatorRecord {
    /// The number of words. A place with a name of length 0 is free.
    pub(crate) const WORDS: usize = FORGOTTEN + 1;
    /// The number of cells, between those of the data position and those of the clients.
    pub(crate) const CELLS: usize = 3;

    /// The index of the first control word.
    const FIRST: usize = (1 + DataRecord::CELLS) * CELL_WORDS;

    /// Passes the words of these places, one bit each, to `put`. Words behind the length 0 of a
    /// free place have no meaning.
    pub(crate) fn save(
        coordinators: &Coordinators,
        places: u64,
        mut put: impl FnMut(Address, u64),
    ) {
        let mut put =
            |word: usize, value| put(Address::Control(CoordinatorRecord::FIRST + word), value);
        if places == 0 {
            return;
        }
        put(CLOSED, coordinators.closed().0);
        put(FORGOTTEN, coordinators.forgotten().0);
        for place in (0..COORDINATORS_MAX).filter(|place| places >> place & 1 == 1) {
            let first = CoordinatorRecord::place(place);
            let Some(entry) = coordinators.at(place) else {
                put(first + NAME_BYTES, 0);
                continue;
            };
            let CoordinatorEntry { name, coordinator, epoch, window, digests } = entry;
            put(first + NAME_BYTES, name.len() as u64);
            put(first + COORDINATOR, coordinator.0);
            put(first + EPOCH, epoch.0);
            put(first + SETTLED, window.settled().0);
            put(first + BITS, window.bits());
            put(first + FIRST_DIGEST, digests.first);
            put(first + DIGEST_OF, digests.settled.0.0);
            put(first + DIGEST, digests.settled.1);
            put(first + AHEAD_OF, digests.ahead.0.0);
            put(first + AHEAD, digests.ahead.1);
            let mut padded = [0; COORDINATOR_NAME_BYTES_MAX];
            padded[..name.len()].copy_from_slice(name.as_bytes());
            for (word, bytes) in (first + NAME..).zip(padded.chunks_exact(8)) {
                put(word, u64::from_le_bytes(bytes.try_into().expect("chunks of eight")));
            }
        }
    }

    /// Loads the coordinators.
    pub(crate) fn load(journal: &Journal, planted: PlantedBugs) -> Result<Coordinators, Fault> {
        let load = |word| journal.load(Address::Control(CoordinatorRecord::FIRST + word));
        CoordinatorRecord::decode(load, planted)
    }

    fn decode(load: impl Fn(usize) -> u64, planted: PlantedBugs) -> Result<Coordinators, Fault> {
        let fault =
            |word: usize, expected: &str| wrong(CoordinatorRecord::FIRST + word, expected.into());
        let epoch = |word: usize, what: &str| match load(word) {
            epoch if epoch < COORDINATOR_EPOCH_LIMIT => Ok(epoch),
            _ => Err(fault(word, what)),
        };
        let closed = CoordinatorEpoch(epoch(CLOSED, "the epoch of closed coordinators")?);
        let forgotten = CoordinatorEpoch(epoch(FORGOTTEN, "the epoch of forgotten coordinators")?);
        let mut places = Vec::new();
        for place in 0..COORDINATORS_MAX {
            let first = CoordinatorRecord::place(place);
            if load(first + NAME_BYTES) == 0 {
                places.push(None);
                continue;
            }
            let name =
                (first + NAME..first + PLACE_WORDS).flat_map(|word| load(word).to_le_bytes());
            let name: Vec<u8> = name.collect();
            let length = usize::try_from(load(first + NAME_BYTES)).ok();
            let name = length.and_then(|length| name.get(..length));
            let name = name.and_then(|name| std::str::from_utf8(name).ok());
            let name = name.ok_or_else(|| fault(first + NAME, "the name of a coordinator"))?;
            let coordinator = CoordinatorId(epoch(first + COORDINATOR, "the id of a coordinator")?);
            let epoch = CoordinatorEpoch(epoch(first + EPOCH, "the epoch of a coordinator")?);
            let window = EffectWindow::of(EffectNumber(load(first + SETTLED)), load(first + BITS));
            let window =
                window.ok_or_else(|| fault(first + SETTLED, "the window of a coordinator"))?;
            let digest_at = |number: usize, digest: usize| {
                (EffectNumber(load(first + number)), load(first + digest))
            };
            let digests = SettledDigests {
                first: load(first + FIRST_DIGEST),
                settled: digest_at(DIGEST_OF, DIGEST),
                ahead: digest_at(AHEAD_OF, AHEAD),
            };
            let name = name.to_owned();
            places.push(Some(CoordinatorEntry { name, coordinator, epoch, window, digests }));
        }
        let coordinators = Coordinators::restored(places, closed, forgotten, planted);
        coordinators.ok_or_else(|| {
            fault(CoordinatorRecord::place(0), "each id and name of a coordinator once")
        })
    }

    /// Returns the first word of a place.
    fn place(place: usize) -> usize {
        1 + PLACE_WORDS * place
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use pushpull_common::protocol::{EffectId, EffectRef};

    use super::*;

    fn encode(coordinators: &Coordinators, places: u64, words: &mut [u64]) {
        CoordinatorRecord::save(coordinators, places, |address, value| {
            let Address::Control(index) = address else { panic!("{address:?}") };
            words[index - CoordinatorRecord::FIRST] = value;
        });
    }

    fn decode(words: &[u64]) -> Result<Coordinators, Fault> {
        CoordinatorRecord::decode(|word| words[word], PlantedBugs::default())
    }

    fn effect(coordinator: CoordinatorId, number: u64) -> EffectRef {
        let id = EffectId { coordinator, epoch: CoordinatorEpoch(0), number: EffectNumber(number) };
        EffectRef { id, settled: EffectNumber(0), digest: number % 5 }
    }

    proptest! {
        /// The words of the changed places are enough to restore every state that is reached.
        #[test]
        fn decoding_restores_every_reachable_state(
            events in proptest::collection::vec((0_u8..8, "[a-cä]{1,2}", 1_u64..70), 0..80),
        ) {
            let mut coordinators = Coordinators::new(PlantedBugs::default());
            let mut words = vec![0; CoordinatorRecord::WORDS];
            let mut epoch = 0;
            for (operation, name, number) in events {
                let known = coordinators.query(&name);
                match (operation, known) {
                    (0..3, _) => {
                        epoch += 1;
                        let _ = coordinators.open(&name, CoordinatorEpoch(epoch));
                    }
                    (3, Ok(known)) => _ = coordinators.close(&name, known.epoch),
                    (_, Ok(known)) => coordinators.settle(&effect(known.coordinator, number)),
                    _ => {}
                }
                let changed = coordinators.take_changed();
                encode(&coordinators, changed, &mut words);
                prop_assert_eq!(decode(&words), Ok(coordinators.clone()));
            }
        }
    }

    #[test]
    fn impossible_words_are_refused_with_their_offset() {
        let mut coordinators = Coordinators::new(PlantedBugs::default());
        coordinators.open("one", CoordinatorEpoch(1)).unwrap();
        coordinators.open("two", CoordinatorEpoch(2)).unwrap();
        let mut words = vec![0; CoordinatorRecord::WORDS];
        encode(&coordinators, u64::MAX, &mut words);
        assert!(decode(&words).is_ok());
        let one = CoordinatorRecord::place(0);
        let two = CoordinatorRecord::place(1);
        let name = words[one + NAME];
        for (word, value) in [
            (CLOSED, COORDINATOR_EPOCH_LIMIT),
            (one + NAME_BYTES, 65),
            (one + NAME_BYTES, u64::MAX),
            (one + NAME, u64::MAX),
            (one + COORDINATOR, COORDINATOR_EPOCH_LIMIT),
            (one + EPOCH, u64::MAX),
            (one + SETTLED, u64::MAX),
            (one + SETTLED, EffectWindow::NUMBER_LIMIT),
            (two + COORDINATOR, 1),
            (two + NAME, name),
        ] {
            let mut words = words.clone();
            words[word] = value;
            let fault = decode(&words).expect_err(&format!("word {word} is {value}"));
            assert!(fault.offset as usize > 8 * CoordinatorRecord::FIRST, "{fault:?}");
        }
    }
}
