// A HashMap of records with strings and boxed numbers.
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Random;

public class Objects {
    record Item(String name, int stock, double price, List<Integer> history) {}

    static final int PER_ITEM = 350; // bytes of one entry, measured with OpenJDK 17

    public static void main(String[] args) throws Exception {
        long size = Long.parseLong(args[0]);
        Random random = new Random(3);
        HashMap<String, Item> items = new HashMap<>();
        for (int i = 0; i < size / PER_ITEM; i++) {
            List<Integer> history = new ArrayList<>();
            for (int j = 0; j < 4; j++) {
                history.add(random.nextInt(100_000));
            }
            String name = "item-" + random.nextInt(1_000_000) + "-" + i;
            items.put(name, new Item(name, random.nextInt(500), random.nextDouble() * 90, history));
        }
        System.out.println("ready");
        System.in.read();
        System.out.println(items.size());
    }
}
